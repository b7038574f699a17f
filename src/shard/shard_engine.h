#pragma once

// Composes partition, buckets and exchange: decides which tensors this rank's local optimizer runs
// on, and moves updated parameters and optimizer state. It does not know which optimizer runs.
// Between before_step and after_step the local optimizer updates local_params; after_step returns
// with the same parameters on every rank. Ranks call the collective functions in the same order.
// Thread safety: one thread at a time. Destruction does not communicate.

#include <exception>
#include <functional>
#include <map>
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
#include "shard/phase_times.h"
#include "shard/sharded_gradients.h"
#include "shard/step_outcome.h"
#include "shard/wide_params.h"
#include "shardstep/export.h"
#include "shardstep/process_group.h"

namespace shardstep {

// Parameters and a text of everything else that must be the same on all ranks.
struct EngineGroup {
  std::vector<at::Tensor> params;
  std::string description;
  std::vector<std::string> names = {};  // of the parameters, or empty
  // By parameter: what its update costs, which sharding by parameter divides evenly; empty: the
  // number of elements.
  std::vector<double> costs = {};
  // Groups whose costs can be compared are divided together.
  int64_t cost_pool = 0;
  std::optional<Sharding> sharding = std::nullopt;  // the engine's if unset

  std::string name(size_t param) const { return names.empty() ? "" : names[param]; }
  std::optional<double> cost(size_t param) const {
    return costs.empty() ? std::nullopt : std::optional(costs[param]);
  }
};

// What the local optimizer updates: the parameter itself or, by element and with overlap, a tensor
// over the same memory whose gradient the engine sets (a 1-D view of some of the elements, or all).
// Of a narrow parameter, with masters or stochastic rounding, the float32 copy.
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

  // Adds param groups. `error` is what kept the caller from making them, if anything: it is thrown
  // here, after the other ranks have been told. `use` is called with the groups in place; if it
  // throws on a rank, that is an error on all of them. If this throws, nothing changes. Collective.
  void add_groups(const std::vector<EngineGroup>& groups, const std::exception_ptr& error = nullptr,
                  const std::function<void()>& use = {});

  size_t group_count() const { return partition_.group_count(); }
  // What this rank owns of a group.
  const std::vector<LocalParam>& local_params(size_t group) const { return local_[group]; }
  // Parameters by index across groups.
  const std::vector<at::Tensor>& params() const { return params_; }
  const at::Tensor& param(int64_t index) const { return params_[index]; }
  int64_t param_count() const { return partition_.param_count(); }
  // Whether the local optimizer updates a float32 copy of the parameter, and gradients are summed
  // in float32.
  bool updates_copy(int64_t param) const {
    return wide_.has_copies_of(params_[param].scalar_type());
  }
  // Whether this copy is a master.
  bool has_master(int64_t param) const {
    return wide_.has_masters_of(params_[param].scalar_type());
  }
  at::Tensor saved_master(int64_t param) const { return wide_.saved_master(param); }
  // Masters by parameter: this rank's share, as WideParams takes them. Warns if some are missing.
  void load_masters(const std::map<int64_t, at::Tensor>& masters);
  // Where parameters without masters are the rounded values of this rank's share of `masters`, they
  // take the values, which then go to the other ranks. Collective.
  void widen_own_params(const std::map<int64_t, at::Tensor>& masters);
  // How a parameter is divided.
  Sharding sharding(int64_t param) const { return partition_.sharding(param); }
  const Partition& partition() const { return partition_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }

  // Starts averaging gradients over the ranks, in place: each rank gets what it owns, and the rest
  // keeps this rank's values. Null in a group of one. REQUIRES: gradients of one dtype, in their
  // parameters' memory order. Collective, with the same parameters and tag on every rank.
  std::unique_ptr<Pending> reduce_to_owners(const std::vector<ParamGradient>& gradients, int tag);

  // Gives the local parameters their gradients. Call it when the gradients are final. Collective in
  // stage 2.
  void before_step();
  // The local optimizer calls its closure: the next collective call is before_step().
  void before_closure();
  // Writes the float32 copies that the local optimizer has updated, rounded, into their parameters.
  // after_step and after_partial_step do it too.
  void round_copies() { wide_.round(); }
  // Sends what this rank owns to every other and receives the rest. Throws if another rank's update
  // has thrown; with overlap_forward wait() does. Collective.
  void after_step();
  // Ends the step of a rank whose update, or closure, has thrown: it does what the rest of the step
  // would have, and the others throw in this step too. Collective.
  void fail_step(const std::exception_ptr& error);
  // With overlap_forward: returns when these parameters, or all, have arrived. The next backward
  // pass and every collective call wait by themselves.
  void wait(const std::vector<int64_t>& params);
  void wait();

  // Stage 2. If false, backward passes accumulate in `.grad`; the next one that synchronizes
  // reduces the sum.
  void set_sync(bool sync);
  bool sync() const { return !reducer_ || reducer_->sync(); }
  // Stage 2: forgets the gradients.
  void drop_sums();
  // Stage 2: is called before the first message of a step where messages must come in one order:
  // ranks that have joined must hear of the step before that.
  void set_announce(std::function<void()> announce) { announce_ = std::move(announce); }
  // Stage 2: a rank that has joined forgets its gradients when the others do.
  void set_joined(bool joined) {
    if (gradients_) gradients_->set_joined(joined);
  }
  // Stage 2: call it on every rank when a Join ends. Collective.
  void end_join(bool is_last_joiner) {
    if (gradients_) gradients_->end_join(is_last_joiner);
  }
  // Stage 2: queries and changes of the gradients; null in a group of one, where `.grad` holds
  // whole gradients.
  ShardedGradients* gradients() const { return gradients_.get(); }
  // Stage 2: what `.grad` of a parameter shows while its gradient is divided among the ranks.
  void set_stand_in(int64_t param, at::Tensor stand_in) {
    if (reducer_) reducer_->set_stand_in(param, std::move(stand_in));
  }
  // Stage 2: a parameter whose `.grad` was replaced since the backward pass, -1 if there is none.
  int64_t replaced_gradient() const {
    return reducer_ && reducer_->made_round() ? reducer_->replaced() : -1;
  }
  // Stage 2: lets code that looks for gradients in `.grad` find them on a rank without a batch.
  void show_gradients() {
    if (reducer_) reducer_->show_stand_ins();
  }
  // The parameters' own gradients, as far as there are any. REQUIRES: a group of one.
  std::vector<at::Tensor> whole_gradients();

  // before_step for some parameters, whose gradients are given: the local optimizer sees no others.
  // REQUIRES: the overlap option.
  void before_partial_step(const std::vector<ParamGradient>& gradients);
  // Starts sending what changed. Collective, with the same parameters and tag on every rank.
  std::unique_ptr<Pending> after_partial_step(const std::vector<ParamGradient>& gradients, int tag);
  // After the last partial step of an iteration; `error` is what an update has thrown, if any. Does
  // not wait: wait() throws if another rank's update has thrown, or its parameters are not the same
  // in dtype, shape, or in being frozen. Collective.
  void end_partial_steps(const std::exception_ptr& error);

  const ProcessGroupPtr& process_group() const { return group_; }
  int rank() const { return group_->getRank(); }
  int world_size() const { return group_->getSize(); }
  const EngineOptions& options() const { return options_; }
  int stage() const { return options_.stage2 ? 2 : 1; }
  // Throws ValueError in stage 1, naming what was called.
  void check_stage_2(const char* what) const;
  // Null in a group of one.
  Exchange* exchange() const { return exchange_.get(); }
  // Moves messages that the host reads, which need not be on the parameters' device. REQUIRES: more
  // than one rank.
  Exchange& control() const { return control_ ? *control_ : *exchange_; }
  // The group of such messages; the process group if that takes CPU tensors.
  const ProcessGroupPtr& control_group() const {
    return exchange_ ? control().process_group() : group_;
  }
  // What has been sent and received so far; nothing in a group of one.
  Traffic traffic() const { return exchange_ ? exchange_->traffic() : Traffic{}; }
  // Where the time of this rank goes. The caller adds the update.
  PhaseTimes& phase_times() const { return *phase_times_; }
  // Bytes of the gradients that this rank keeps in stage 2 at the moment.
  int64_t gradient_bytes() const { return reducer_ ? reducer_->sum_bytes() : 0; }
  // "native", "pairwise", "shared_memory", "hierarchical", or "none" in a group of one.
  const char* exchange_name() const { return exchange_ ? exchange_->name() : "none"; }
  // Whether calls with different tags may come in different orders on different ranks.
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
  int64_t kind_of(const at::Tensor& param, Sharding sharding);
  std::vector<std::string> describe_groups(const std::vector<EngineGroup>& groups) const;
  void adopt(const std::vector<EngineGroup>& groups, int64_t channel);
  void forget_since(const Partition& before);
  void connect(int64_t channel);
  void broadcast_params(size_t first);
  void build_new_buckets();
  void reduce_new_buckets(size_t first);
  void set_whole_gradients();
  void set_reduced_gradients();
  // Ends the rounds of stage 2, if any, and compares the parameters across ranks.
  void compare();
  // Hands gradients to the local parameters.
  void take_gradients();
  void send_params(const std::exception_ptr& error);
  void hear_outcome();
  void await_bucket(size_t bucket);
  void has_arrived(size_t bucket);
  at::Device control_device() const;
  void add_local_params(size_t group);
  void follow_params();
  // Whether the local parameter is the engine's own tensor.
  bool aliased(int64_t param) const {
    return sharding(param) == Sharding::kElement || options_.overlap || options_.stage2 ||
           options_.master_dtype || updates_copy(param);
  }
  bool share_parameters() const { return options_.stage2 && options_.stage2->share_parameters; }
  at::Tensor local_view(int64_t param, Range elements) const;
  // Appends each owner's part of a tensor that has the parameter's memory order.
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
  detail::StepOutcome outcome_;
  std::unique_ptr<PhaseTimes> phase_times_ = std::make_unique<PhaseTimes>();
  std::unique_ptr<Exchange> exchange_;  // null in a group of one
  std::unique_ptr<Exchange> control_;   // null if exchange_ moves CPU tensors
  std::vector<at::Tensor> params_;      // by index across groups
  std::vector<std::string> kinds_;
  std::vector<Bucket> buckets_;
  std::function<void()> announce_;
  std::unique_ptr<GradientReducer> reducer_;             // stage 2, more than one rank
  std::unique_ptr<ShardedGradients> gradients_;          // likewise
  std::vector<std::unique_ptr<Pending>> arriving_;       // by bucket; null if it has arrived
  std::unique_ptr<Pending> arriving_outcome_;            // of the last step
  std::vector<Place> places_;                            // by parameter
  std::vector<std::vector<bool>> active_;                // by bucket and slot: what is sent
  std::vector<Parts> parts_;                             // by bucket
  std::vector<bool> trainable_;                          // by parameter, when last checked
  std::vector<std::vector<LocalParam>> local_;           // by group
  std::vector<std::optional<LocalPlace>> local_places_;  // by parameter; unset if not owned here
  WideParams wide_;
};

}  // namespace shardstep
