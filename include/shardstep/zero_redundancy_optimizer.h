#pragma once

// The C++ face: a torch::optim::Optimizer over all parameters whose update and state are divided
// among the ranks of a group. It owns the local optimizer, which runs on what this rank owns.
// Collective: construction, add_param_group, step, consolidate_state_dict, and what saves and loads
// checkpoints. Thread safety: one thread at a time. Destruction does not communicate.

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "shardstep/checkpoint.h"
#include "shardstep/join.h"
#include "shardstep/local_optimizer.h"
#include "shardstep/process_group.h"
#include "shardstep/sharding.h"
#include "shardstep/state_dict.h"

namespace torch::nn {
class Module;
}

namespace shardstep {

class Checkpointer;
class Pending;
class ShardEngine;
struct ParamGradient;
struct StateValue;

// What a checkpoint holds besides the optimizer's state and options.
struct CheckpointOptions {
  // Its parameters and buffers, which also give the optimizer's parameters their names. Null: not.
  TORCH_ARG(std::shared_ptr<torch::nn::Module>, module);
  // torch's random generators of each rank. Loaded at another world size, ranks that were not
  // there keep theirs.
  TORCH_ARG(bool, rng) = true;
  // Small values of the user's own: numbers, strings, bools, none, and lists, tuples and dicts of
  // these. Rank 0's count.
  TORCH_ARG(NamedValues, extra);
  // save_checkpoint returns when this rank's shard is copied; a thread writes it.
  TORCH_ARG(bool, asynchronous) = false;
  // Called now and then by the thread that writes.
  TORCH_ARG(std::function<void(CheckpointProgress)>, progress);
  // How long rank 0 waits for another rank's shard to show in the directory. Unset: 30 minutes in
  // the background; 3 once all ranks have said that theirs are written.
  TORCH_ARG(std::optional<std::chrono::milliseconds>, timeout);
};

struct ZeroOptions {
  // 1: gradients arrive whole, as DistributedDataParallel leaves them. 2: the optimizer averages
  // them over the ranks during the backward pass, and each rank keeps what it owns. `.grad` is then
  // a tensor without memory: operations on it throw, and say what to call.
  TORCH_ARG(int, stage) = 1;
  // The default group if null.
  TORCH_ARG(ProcessGroupPtr, process_group);
  TORCH_ARG(Sharding, sharding) = Sharding::kParameter;
  TORCH_ARG(ExchangeKind, exchange) = ExchangeKind::kAuto;
  // Parameters become views of one flat tensor per dtype and device, which travels in one piece.
  TORCH_ARG(bool, parameters_as_bucket_view) = false;
  // The update runs inside DistributedDataParallel's backward pass, by a hook of zero_hooks.h;
  // step() only warns.
  TORCH_ARG(bool, overlap_with_ddp) = false;
  // Buckets of at most this size, 0 for no limit; a bucket is what moves at a time. Unset: no
  // limit in stage 1, 25 in stage 2.
  TORCH_ARG(std::optional<double>, bucket_cap_mb);
  // Stage 2, ranks on one host: one copy of the parameters for all of them. On the condition that
  // no rank changes parameters by itself, and that none reads them while another is in step().
  TORCH_ARG(bool, share_parameters) = false;
  // Stage 2: step() returns while parameters still travel. Call wait() before anything reads them.
  TORCH_ARG(bool, overlap_forward) = false;
  // Stage 2: kBFloat16 or kHalf. Wider gradients are rounded to it and travel at half the width;
  // their owner adds them up in their own dtype.
  TORCH_ARG(std::optional<at::ScalarType>, gradient_dtype);
  // Says that an optimizer of the user's own is element-wise: its update of an element depends on
  // nothing but that element's gradient and state. Sharding by element takes no other.
  TORCH_ARG(bool, elementwise) = false;
};

using ParamsAndGradients = std::vector<std::pair<at::Tensor, at::Tensor>>;

class SHARDSTEP_API ZeroRedundancyOptimizer : public torch::optim::Optimizer, public Joinable {
 public:
  // Collective. Throws ValueError on every rank if ranks were given different parameters or
  // options, or if one of them was given something it cannot take. A tensor that comes twice in a
  // group (tied weights) counts once.
  ZeroRedundancyOptimizer(std::vector<torch::optim::OptimizerParamGroup> param_groups,
                          LocalOptimizer local, const ZeroOptions& options = {});
  ZeroRedundancyOptimizer(std::vector<at::Tensor> params, LocalOptimizer local,
                          const ZeroOptions& options = {});
  // Options name the optimizer: AdamOptions, AdamWOptions, SGDOptions, AdagradOptions,
  // RMSpropOptions.
  template <class OptimizerOptions>
  ZeroRedundancyOptimizer(std::vector<torch::optim::OptimizerParamGroup> param_groups,
                          const OptimizerOptions& optimizer, const ZeroOptions& options = {})
      : ZeroRedundancyOptimizer(std::move(param_groups), local_optimizer(optimizer), options) {}
  template <class OptimizerOptions>
  ZeroRedundancyOptimizer(std::vector<at::Tensor> params, const OptimizerOptions& optimizer,
                          const ZeroOptions& options = {})
      : ZeroRedundancyOptimizer(std::move(params), local_optimizer(optimizer), options) {}

  ~ZeroRedundancyOptimizer() override;

  // Updates what this rank owns, then brings all parameters up to date on every rank. Returns the
  // closure's loss. Collective.
  at::Tensor step(LossClosure closure = nullptr) override;

  // Stage 2 as well: forgets the gradients. If a backward pass threw on this rank, it makes up for
  // what the others wait for.
  void zero_grad(bool set_to_none = true);

  // The whole gradient of a parameter of this optimizer; undefined if there is none. Collective in
  // stage 2.
  at::Tensor full_gradient(const at::Tensor& param);

  // Stage 2: while the returned object lives, backward passes add up in `.grad` without talking to
  // other ranks; the next one behind it takes that along.
  class SHARDSTEP_API NoSync {
   public:
    explicit NoSync(ShardEngine& engine);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    ShardEngine& engine_;
    bool before_;
  };
  [[nodiscard]] NoSync no_sync() { return NoSync(*engine_); }

  // Stage 2: scales the gradients down to a norm over all of them of at most max_norm, and returns
  // what it was, the same on every rank. Collective.
  double clip_grad_norm_(double max_norm, double norm_type = 2, bool error_if_nonfinite = false);
  // Stage 2. Collective.
  void clip_grad_value_(double clip_value);

  // For zero_hooks.h: starts averaging gradients over the ranks, see ShardEngine::reduce_to_owners.
  // REQUIRES: parameters of this optimizer. Collective.
  std::unique_ptr<Pending> reduce_to_owners(const ParamsAndGradients& gradients, int tag);
  // For zero_hooks.h: updates what this rank owns of these parameters, and starts sending it; other
  // parameters than the optimizer's are passed over. REQUIRES: overlap_with_ddp. Collective, with
  // the same parameters and tag on every rank; updates with different tags may come in any order.
  void update(const ParamsAndGradients& gradients, int tag);
  // Returns when the parameters have arrived on this rank that update() sent, or step() with
  // overlap_forward. Notices groups added through the base class. Collective.
  void wait();

  // Collective. A group added through the base class is noticed at the next collective call.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  // Gathers the state of all ranks on rank `to`, which gets it back; the others get nothing.
  // It stays available through state_dict() until the next step. Collective.
  std::optional<StateDict> consolidate_state_dict(int to = 0);
  // What was consolidated here; without that only as long as no rank has any state. Throws
  // RuntimeError elsewhere.
  StateDict state_dict() const;
  // Takes a state dict of a plain optimizer, or one consolidated at any world size; this rank keeps
  // its share. Throws ValueError that names what does not fit, and has changed nothing.
  void load_state_dict(const StateDict& dict);

  // Writes a checkpoint (checkpoint.h): each rank what it owns. What was in the directory before
  // stays until the new one is complete, also if this fails. Waits for the last save first.
  // Collective.
  void save_checkpoint(const std::string& directory, const CheckpointOptions& options = {});
  // Returns when the last save is complete, or throws what went wrong on any rank. Collective.
  void wait_checkpoint();
  CheckpointProgress checkpoint_progress() const;
  // How many bytes of the shards the last load_checkpoint read on this rank.
  int64_t checkpoint_bytes_read() const;
  // Loads a checkpoint of any world size and sharding; each rank reads what it needs. Returns what
  // was saved as `extra`. Throws ValueError that names what does not fit or is damaged, on every
  // rank, and has changed nothing. Collective.
  NamedValues load_checkpoint(const std::string& directory, const CheckpointOptions& options = {});

  // torch::save and torch::load, in the format of the plain torch::optim class. Saving takes what
  // was consolidated here.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // A rank without inputs makes its share of the others' steps, with the gradients it finds.
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override;
  at::Device join_device() const override;
  ProcessGroupPtr join_process_group() const override { return process_group(); }

  // Whether this optimizer has the parameter.
  bool has(const at::Tensor& param) const {
    return index_of_.count(param.unsafeGetTensorImpl()) > 0;
  }
  // The local optimizer. Its parameters are what this rank owns.
  torch::optim::Optimizer& optim() { return *optim_; }
  const ShardEngine& engine() const { return *engine_; }
  const ProcessGroupPtr& process_group() const;
  int rank() const { return process_group()->getRank(); }
  int world_size() const { return process_group()->getSize(); }
  // This rank in the group that all processes started in.
  int global_rank() const { return shardstep::global_rank(process_group(), rank()); }
  bool parameters_as_bucket_view() const;
  bool overlap_with_ddp() const;
  // Bytes of optimizer state that this rank holds.
  int64_t local_state_bytes() const;

 private:
  using GroupOptions = std::vector<std::unique_ptr<torch::optim::OptimizerOptions>>;
  // By the local parameter's TensorImpl.
  using ParamStates =
      std::vector<std::pair<void*, std::unique_ptr<torch::optim::OptimizerParamState>>>;

  void add_groups(std::vector<torch::optim::OptimizerParamGroup> groups);
  void adopt_new_groups(std::exception_ptr error);
  std::vector<ParamGradient> by_index(const ParamsAndGradients& gradients) const;
  // The update of what this rank owns, in step().
  at::Tensor update_own(const LossClosure& closure);
  void push_options();
  void pull_options();
  std::map<int64_t, NamedValues> read_local_state() const;
  bool has_state_from_the_start() const;
  StateDict whole_state_dict(const std::map<int64_t, std::vector<StateValue>>& state) const;
  // Makes these the options and the whole state.
  void take(const GroupOptions& options, ParamStates& states);
  std::unique_ptr<torch::optim::Optimizer> make_plain() const;

  LocalOptimizer local_;
  std::unique_ptr<ShardEngine> engine_;
  std::unique_ptr<Checkpointer> checkpointer_;
  std::unique_ptr<torch::optim::Optimizer> optim_;
  std::optional<StateDict> consolidated_;
  bool may_have_state_ = false;  // on any rank, besides what local optimizers are made with
  std::unordered_map<const void*, int64_t> index_of_;  // by the parameter's TensorImpl
  std::vector<std::unique_ptr<Pending>> arriving_;     // what update() sent
};

}  // namespace shardstep
