#pragma once

// Partition, buckets and exchange composed: which tensors the local optimizer of this rank runs on,
// and how updated parameters and optimizer state travel. It does not know which optimizer runs.
// Between before_step and after_step the local optimizer updates local_params; after_step returns
// with the same parameters on every rank. Ranks call the collective functions in the same order.
// Thread safety: one thread at a time. Destruction does not communicate.

#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/exchange.h"
#include "shard/bucket.h"
#include "shard/gradient_reducer.h"
#include "shard/partition.h"
#include "shardstep/export.h"
#include "shardstep/process_group.h"

namespace shardstep {

struct EngineOptions {
  // 1: gradients arrive whole. 2: the engine adds them up, and each rank keeps what it owns.
  int stage = 1;
  Sharding sharding = Sharding::kParameter;
  BucketStorage storage = BucketStorage::kInPlace;
  ExchangeKind exchange = ExchangeKind::kAuto;
  // 0: one bucket per dtype and device. Unset: that in stage 1, small ones in stage 2.
  std::optional<double> bucket_cap_mb;
  // The update runs inside the backward pass, some parameters at a time.
  bool overlap = false;
  // Stage 2: one copy of the parameters for all ranks, which share memory. No rank may change them
  // by itself.
  bool share_parameters = false;
  // Stage 2: after_step returns at once, and parameters are there when wait() returns.
  bool overlap_forward = false;
  // Stage 2: what wider gradients are rounded to, to travel; they are added up in their own dtype.
  std::optional<at::ScalarType> gradient_dtype;
};

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

// A value of a parameter's optimizer state: a tensor, or bytes that only the caller understands.
struct StateValue {
  std::string name;
  at::Tensor tensor;
  std::string bytes;
};
using ParamState = std::vector<StateValue>;
// By parameter index across groups.
using EngineState = std::map<int64_t, ParamState>;

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
  // Parameter by index across groups.
  const at::Tensor& param(int64_t index) const { return params_[index]; }
  int64_t param_count() const { return partition_.param_count(); }
  const Partition& partition() const { return partition_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }

  // Starts averaging gradients over the ranks, in place: each rank gets what it owns, and the rest
  // keeps this rank's values. Null in a group of one. REQUIRES: gradients of one dtype, in their
  // parameters' memory order. Collective: ranks agree on the parameters and the tag; calls with
  // different tags may come in any order.
  std::unique_ptr<Pending> reduce_to_owners(const std::vector<ParamGradient>& gradients, int tag);

  // Stage 1: ranks without gradients of this step get what they own of them from one that has. So a
  // rank that has joined can make its share of the step. Collective.
  void lend_gradients(bool has_gradients);

  // Hands gradients to the local parameters. Call it when the gradients are final. Collective in
  // stage 2.
  void before_step();
  // Sends what this rank owns to every other and receives the rest. Collective.
  void after_step();
  // With overlap_forward: returns when these parameters have arrived, or all. Nothing else needs
  // it: the next backward pass and every collective call wait by themselves.
  void wait(const std::vector<int64_t>& params);
  void wait();

  // Stage 2. While off, backward passes add up in `.grad`; the next one that synchronizes takes
  // that along.
  void set_sync(bool sync);
  bool sync() const { return !reducer_ || reducer_->sync(); }
  // Stage 2: forgets the gradients since the last step.
  void drop_sums();
  // Stage 2: scales the gradients down to a norm over all of them of at most max_norm, and returns
  // what it was, the same on every rank. `norm_type` may be infinite. Collective.
  double clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite);
  // Stage 2. Collective.
  void clip_grad_value(double clip_value);

  // The same for some parameters, whose gradients are given: the local optimizer sees no others.
  // REQUIRES: the overlap option.
  void before_partial_step(const std::vector<ParamGradient>& gradients);
  // Starts sending what changed. Ranks agree on the parameters and the tag; steps with different
  // tags may come in any order. Collective.
  std::unique_ptr<Pending> after_partial_step(const std::vector<ParamGradient>& gradients, int tag);

  // The state of all ranks on rank `to`, whole and on the CPU; empty elsewhere. Tensors go to `to`
  // alone, a bucket at a time. Collective.
  EngineState gather_state(const EngineState& local, int to);
  // This rank's share of a whole state, copied to the parameters' devices and dtypes.
  EngineState cut_state(const EngineState& whole) const;

  const ProcessGroupPtr& process_group() const { return group_; }
  int rank() const { return group_->getRank(); }
  int world_size() const { return group_->getSize(); }
  const EngineOptions& options() const { return options_; }
  // What went over the wire so far; nothing in a group of one.
  Traffic traffic() const { return exchange_ ? exchange_->traffic() : Traffic{}; }
  // "native", "pairwise", "shared_memory", or "none" in a group of one.
  const char* exchange_name() const { return exchange_ ? exchange_->name() : "none"; }

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
  void check_options() const;
  void broadcast_params(size_t first);
  void build_new_buckets();
  void reduce_new_buckets(size_t first);
  void meet();
  bool set_reduced_gradients();
  // Says whether gradients were added up since the last call.
  bool take_gradients();
  void drop_param_gradients();
  std::vector<at::Tensor> local_gradients() const;
  std::vector<double> of_all_ranks(double value) const;
  void lend_gradients(int from, int to);
  void check_stage_2(const char* what) const;
  void add_local_params(size_t group);
  void follow_params();
  // Whether local parameters are tensors of the engine's own.
  bool aliased() const {
    return options_.sharding == Sharding::kElement || options_.overlap || options_.stage == 2;
  }
  at::Tensor local_view(int64_t param, Range elements) const;
  // Adds each owner's part of a tensor that lies in memory as the parameter does.
  void append_parts(int64_t param, const at::Tensor& tensor, Parts& parts) const;
  void set_gradient(LocalParam& local, const at::Tensor& gradient);
  void drop_gradients();
  std::vector<const Slice*> owned_slices(int rank) const;

  ProcessGroupPtr group_;
  EngineOptions options_;
  Partition partition_;
  std::unique_ptr<Exchange> exchange_;  // null in a group of one
  std::vector<at::Tensor> params_;      // by index across groups
  std::vector<std::string> kinds_;
  std::vector<Bucket> buckets_;
  std::unique_ptr<GradientReducer> reducer_;             // stage 2, more than one rank
  std::vector<std::unique_ptr<Pending>> arriving_;       // by bucket; null if it is there
  std::vector<Place> places_;                            // by parameter
  std::vector<std::vector<bool>> active_;                // by bucket and slot: what travels
  std::vector<Parts> parts_;                             // by bucket
  std::vector<bool> trainable_;                          // by parameter, when last looked at
  std::vector<std::vector<LocalParam>> local_;           // by group
  std::vector<std::optional<LocalPlace>> local_places_;  // by parameter; nothing if not owned here
};

}  // namespace shardstep
