#pragma once

// Partition, buckets and exchange composed: which tensors the local optimizer of this rank runs on,
// and how updated parameters and optimizer state travel. It does not know which optimizer runs.
// Between before_step and after_step the local optimizer updates local_params; after_step returns
// with the same parameters on every rank. Ranks call the collective functions in the same order.
// Thread safety: one thread at a time. Destruction does not communicate.

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/exchange.h"
#include "shard/bucket.h"
#include "shard/engine_options.h"
#include "shard/gradient_reducer.h"
#include "shard/param_agreement.h"
#include "shard/partition.h"
#include "shard/sharded_gradients.h"
#include "shardstep/export.h"
#include "shardstep/process_group.h"

namespace shardstep {

// Parameters and, in words, everything else that ranks must agree on about them.
struct EngineGroup {
  std::vector<at::Tensor> params;
  std::string description;
};

// What the local optimizer updates: the parameter itself, or, by element and with overlap, a tensor
// over the same memory whose gradient the engine sets: a 1-D view of some of the elements, or all.
struct LocalParam {
  int64_t index = 0;  // of the parameter, across groups
  Range elements;     // of the parameter, in memory order
  at::Tensor tensor;
};

struct ParamGradient {
  int64_t index = 0;  // of the parameter, across groups
  at::Tensor gradient;
};

class SHARDSTEP_API ShardEngine {
 public:
  ShardEngine(ProcessGroupPtr group, EngineOptions options);

  // Adds param groups, on top of those there are. `error` is what kept the caller from making them,
  // if anything: it is thrown here, after the other ranks know. If this throws, nothing changed.
  // Collective.
  void add_groups(const std::vector<EngineGroup>& groups,
                  const std::exception_ptr& error = nullptr);

  size_t group_count() const { return partition_.group_count(); }
  // What this rank owns of a group.
  const std::vector<LocalParam>& local_params(size_t group) const { return local_[group]; }
  // Parameters by index across groups.
  const std::vector<at::Tensor>& params() const { return params_; }
  const at::Tensor& param(int64_t index) const { return params_[index]; }
  int64_t param_count() const { return partition_.param_count(); }
  const Partition& partition() const { return partition_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }

  // Starts averaging gradients over the ranks, in place: each rank gets what it owns, and the rest
  // keeps this rank's values. Null in a group of one. REQUIRES: gradients of one dtype, in their
  // parameters' memory order. Collective: ranks agree on the parameters and the tag.
  std::unique_ptr<Pending> reduce_to_owners(const std::vector<ParamGradient>& gradients, int tag);

  // Hands gradients to the local parameters. Call it when the gradients are final. Collective in
  // stage 2.
  void before_step();
  // Sends what this rank owns to every other and receives the rest. Collective.
  void after_step();
  // Ends the step of a rank whose update, or closure, has thrown, so that no other rank is left
  // waiting. They hear of it at once if they wait for this rank's gradients, else at the next step.
  // Collective, as the rest of the step would be.
  void fail_step(const std::exception_ptr& error);
  // With overlap_forward: returns when these parameters have arrived, or all. Nothing else needs
  // it: the next backward pass and every collective call wait by themselves.
  void wait(const std::vector<int64_t>& params);
  void wait();

  // Stage 2. While off, backward passes add up in `.grad`; the next one that synchronizes takes
  // that along.
  void set_sync(bool sync);
  bool sync() const { return !reducer_ || reducer_->sync(); }
  // Stage 2: forgets the gradients.
  void drop_sums();
  // Stage 2: what can be asked of the gradients and done to them; null in a group of one, where
  // they are whole, in `.grad`.
  ShardedGradients* gradients() const { return gradients_.get(); }
  // Stage 2: what `.grad` of a parameter shows while its gradient is divided among the ranks.
  void set_stand_in(int64_t param, at::Tensor stand_in) {
    if (reducer_) reducer_->set_stand_in(param, std::move(stand_in));
  }
  // Stage 2: a parameter whose `.grad` somebody has replaced since the backward pass, -1 if there
  // is none.
  int64_t replaced_gradient() const {
    return reducer_ && reducer_->made_round() ? reducer_->replaced() : -1;
  }
  // Stage 2: lets code that looks for gradients in `.grad` find them on a rank without a batch.
  void show_gradients();
  // In a group of one: the gradients of the local parameters.
  std::vector<at::Tensor> owned_gradients();

  // before_step for some parameters, whose gradients are given: the local optimizer sees no others.
  // REQUIRES: the overlap option.
  void before_partial_step(const std::vector<ParamGradient>& gradients);
  // Starts sending what changed. Ranks agree on the parameters and the tag. Collective.
  std::unique_ptr<Pending> after_partial_step(const std::vector<ParamGradient>& gradients, int tag);

  const ProcessGroupPtr& process_group() const { return group_; }
  int rank() const { return group_->getRank(); }
  int world_size() const { return group_->getSize(); }
  const EngineOptions& options() const { return options_; }
  int stage() const { return options_.stage2 ? 2 : 1; }
  // Throws ValueError in stage 1, naming what was called.
  void check_stage_2(const char* what) const;
  // Null in a group of one.
  Exchange* exchange() const { return exchange_.get(); }
  // Tells the other ranks that this one cannot go on, and why, as far as the exchange can.
  void give_up(const std::string& message) {
    if (exchange_) exchange_->give_up(message);
  }
  // What went over the wire so far; nothing in a group of one.
  Traffic traffic() const { return exchange_ ? exchange_->traffic() : Traffic{}; }
  // "native", "pairwise", "shared_memory", or "none" in a group of one.
  const char* exchange_name() const { return exchange_ ? exchange_->name() : "none"; }
  // Whether calls with different tags may come in another order on another rank.
  bool any_order() const { return !exchange_ || exchange_->any_order(); }

 private:
  struct Place {
    size_t bucket;
    size_t slot;
  };
  struct LocalPlace {
    size_t group;
    size_t position;
  };
  int64_t kind_of(const at::Tensor& param);
  std::vector<std::string> describe_groups(const std::vector<EngineGroup>& groups) const;
  void adopt(const std::vector<EngineGroup>& groups, int64_t channel);
  void forget_since(const Partition& before);
  void connect(int64_t channel);
  void broadcast_params(size_t first);
  void build_new_buckets();
  void reduce_new_buckets(size_t first);
  void meet();
  void set_reduced_gradients();
  // Ends the rounds of stage 2, if any, and compares the parameters over the ranks.
  void take_gradients();
  void add_local_params(size_t group);
  void follow_params();
  // Whether local parameters are tensors of the engine's own.
  bool aliased() const {
    return options_.sharding == Sharding::kElement || options_.overlap || options_.stage2;
  }
  bool share_parameters() const { return options_.stage2 && options_.stage2->share_parameters; }
  at::Tensor local_view(int64_t param, Range elements) const;
  // Adds each owner's part of a tensor that lies in memory as the parameter does.
  void append_parts(int64_t param, const at::Tensor& tensor, Parts& parts) const;
  void set_gradient(LocalParam& local, const at::Tensor& gradient);
  void drop_gradients();

  ProcessGroupPtr group_;
  EngineOptions options_;
  // Where in a step this rank is.
  enum class Phase { kOutside, kComparing, kUpdating };
  Phase phase_ = Phase::kOutside;
  Partition partition_;
  detail::ParamAgreement agreement_;
  std::unique_ptr<Exchange> exchange_;  // null in a group of one
  std::vector<at::Tensor> params_;      // by index across groups
  std::vector<std::string> kinds_;
  std::vector<Bucket> buckets_;
  std::unique_ptr<GradientReducer> reducer_;             // stage 2, more than one rank
  std::unique_ptr<ShardedGradients> gradients_;          // likewise
  std::vector<std::unique_ptr<Pending>> arriving_;       // by bucket; null if it is there
  std::vector<Place> places_;                            // by parameter
  std::vector<std::vector<bool>> active_;                // by bucket and slot: what travels
  std::vector<Parts> parts_;                             // by bucket
  std::vector<bool> trainable_;                          // by parameter, when last looked at
  std::vector<std::vector<LocalParam>> local_;           // by group
  std::vector<std::optional<LocalPlace>> local_places_;  // by parameter; nothing if not owned here
};

}  // namespace shardstep
