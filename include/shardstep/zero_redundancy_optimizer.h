#pragma once

// A torch::optim::Optimizer over all parameters whose update and state are divided among the ranks
// of a group. It owns the local optimizer, which runs on what this rank owns.
// Collective: construction, add_param_group, step, consolidate_state_dict, and saving and loading
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
#include "shardstep/optimizer_stats.h"
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
struct EngineGroup;
struct LocalParam;
struct ParamGradient;
struct StateValue;

// What a checkpoint holds besides the optimizer's state and options.
struct CheckpointOptions {
  // The module whose parameters and buffers are saved too, and which names the optimizer's
  // parameters. Null for none.
  TORCH_ARG(std::shared_ptr<torch::nn::Module>, module);
  // Each rank's torch random generators. Ranks that did not exist when the checkpoint was saved
  // keep theirs.
  TORCH_ARG(bool, rng) = true;
  // The user's own small values: numbers, strings, bools, none, and lists, tuples and dicts of
  // these. Rank 0's are saved.
  TORCH_ARG(NamedValues, extra);
  // save_checkpoint returns as soon as this rank's shard is copied; a background thread writes it.
  TORCH_ARG(bool, asynchronous) = false;
  // Called from time to time by the thread that writes.
  TORCH_ARG(std::function<void(CheckpointProgress)>, progress);
  // How long rank 0 waits for another rank's shard to appear in the directory. Unset: 30 minutes in
  // the background; 3 once all ranks have reported that theirs are written.
  TORCH_ARG(std::optional<std::chrono::milliseconds>, timeout);
  // With a directory such as "runs/{step}": how many checkpoints of the series stay, the new one
  // included. Unset: all.
  TORCH_ARG(std::optional<int64_t>, keep_last);
};

struct ZeroOptions {
  // 1: gradients arrive whole, as DistributedDataParallel leaves them. 2: the optimizer averages
  // them over the ranks during the backward pass, and each rank keeps what it owns. `.grad` is then
  // a tensor without memory: operations on it throw an error that says what to call instead.
  TORCH_ARG(int, stage) = 1;
  // Unset: the default group.
  TORCH_ARG(std::optional<ProcessGroupPtr>, process_group);
  TORCH_ARG(Sharding, sharding) = Sharding::kParameter;
  TORCH_ARG(ExchangeKind, exchange) = ExchangeKind::kAuto;
  // Parameters become views of one flat tensor per dtype and device, which is sent in one piece.
  TORCH_ARG(bool, parameters_as_bucket_view) = false;
  // A hook of zero_hooks.h runs the update inside DistributedDataParallel's backward pass; step()
  // only warns.
  TORCH_ARG(bool, overlap_with_ddp) = false;
  // Maximum size of a bucket, the unit of communication, in MiB; 0 for no limit. Unset: in stage 2
  // 0.25 per rank, at least 25 and at most 256; no limit in stage 1, except on a device without
  // parameters_as_bucket_view, where it is as in stage 2.
  TORCH_ARG(std::optional<double>, bucket_cap_mb);
  // Stage 2, parameters on the CPU: the ranks of each host share one copy of the parameters.
  // REQUIRES: no rank changes parameters by itself, and none reads them while another is in step().
  TORCH_ARG(bool, share_parameters) = false;
  // Stage 2: step() returns while parameters are still being sent. Call wait() before anything
  // reads them.
  TORCH_ARG(bool, overlap_forward) = false;
  // Stage 2: the module that the parameters belong to. Rank 0's buffers, and those of its
  // parameters that the optimizer does not have, are copied to every rank. Errors and checkpoints
  // call the parameters by the module's names. If null, the user must keep buffers the same.
  TORCH_ARG(std::shared_ptr<torch::nn::Module>, module);
  // step() copies rank 0's buffers of the module to every rank, as DistributedDataParallel does
  // before the next forward.
  TORCH_ARG(bool, broadcast_buffers) = true;
  // Stage 2: kBFloat16, kHalf or kChar. Wider gradients are rounded to it and sent at that width;
  // their owner sums them in their own dtype. kChar stands for blocks of 256 elements with one
  // float32 scale each: an element is off by at most 1/254 of the largest of its block, and a block
  // with an inf or NaN arrives as NaN. Between hosts of several ranks, the hosts' sums are rounded.
  TORCH_ARG(std::optional<at::ScalarType>, gradient_dtype);
  // kFloat: each rank keeps float32 copies, the masters, of the bfloat16 and float16 parameters
  // that it owns. The local optimizer updates the masters, gradients are summed in float32 (in
  // stage 1 DDP has already averaged them), and the rounded parameters are sent. If a parameter is
  // changed in place, its master follows; changes through `.data` are not noticed. Masters are
  // part of the state, as "master_param".
  TORCH_ARG(std::optional<at::ScalarType>, master_dtype);
  // Without masters. kStochastic is for bfloat16 parameters: the local optimizer updates float32
  // copies of those that this rank owns, which take memory during step() only, and the result is
  // rounded up or down at random, so that on average no update is lost for being smaller than a
  // parameter's last bit. Gradients are summed in float32, and the state is float32. Each step()
  // draws one number from torch's default generator on the CPU, which checkpoints save. Parameters
  // as wide as float32 are updated as without it; float16 is refused.
  TORCH_ARG(Rounding, rounding) = Rounding::kNearest;
  // When sharding by parameter: what the update of a parameter costs. The ranks divide the total
  // evenly. Unset: the number of elements; for Muon, the number of operations.
  TORCH_ARG(std::function<double(const at::Tensor&)>, cost);
  // Declares that a user-defined optimizer is element-wise: its update of an element depends on
  // nothing but that element's gradient and state. Sharding by element refuses all others.
  TORCH_ARG(bool, elementwise) = false;
};

using ParamsAndGradients = std::vector<std::pair<at::Tensor, at::Tensor>>;

class SHARDSTEP_API ZeroRedundancyOptimizer : public torch::optim::Optimizer, public Joinable {
 public:
  // A group whose options have a different type than `local`'s is updated by that type's optimizer,
  // for example matrices by Muon and the rest by AdamW; it is sharded by parameter unless that
  // optimizer is element-wise. A tensor that appears twice in a group (tied weights) counts once.
  // Throws ValueError on every rank if ranks were given different parameters or options, or if one
  // of them was given an invalid argument. Collective.
  ZeroRedundancyOptimizer(std::vector<torch::optim::OptimizerParamGroup> param_groups,
                          LocalOptimizer local, const ZeroOptions& options = {});
  ZeroRedundancyOptimizer(std::vector<at::Tensor> params, LocalOptimizer local,
                          const ZeroOptions& options = {});
  // The type of the options selects the optimizer: AdamOptions, AdamWOptions, SGDOptions,
  // AdagradOptions, RMSpropOptions, and our MuonOptions.
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

  // Clears the gradients, in stage 2 too. If a backward pass threw on this rank, it also sends
  // what the other ranks wait for.
  void zero_grad(bool set_to_none = true);

  // Returns the whole gradient of a parameter of this optimizer; undefined if there is none.
  // Collective in stage 2.
  at::Tensor full_gradient(const at::Tensor& param);

  // Stage 2: during the lifetime of the returned object, backward passes accumulate in `.grad`
  // without communication; the first one afterwards reduces the sum.
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

  // Stage 2: scales the gradients so that their total norm is at most max_norm, and returns the
  // norm before scaling, the same on every rank. Collective.
  double clip_grad_norm_(double max_norm, double norm_type = 2, bool error_if_nonfinite = false);
  // Stage 2: clips every element of the gradients. Collective.
  void clip_grad_value_(double clip_value);
  // For GradScaler: multiplies all gradients by a factor, and returns whether they were finite, the
  // same on every rank. REQUIRES: no overlap_with_ddp. Collective in stage 2, and with
  // reduce_to_owners_hook.
  bool scale_gradients_(double factor);

  // For zero_hooks.h: starts averaging gradients over the ranks, see ShardEngine::reduce_to_owners.
  // REQUIRES: parameters of this optimizer. Collective.
  std::unique_ptr<Pending> reduce_to_owners(const ParamsAndGradients& gradients, int tag);
  // For zero_hooks.h: updates what this rank owns of these parameters, and starts sending it;
  // parameters that do not belong to the optimizer are ignored. REQUIRES: overlap_with_ddp.
  // Collective, with the same parameters and tag on every rank; updates with different tags may
  // come in any order.
  void update(const ParamsAndGradients& gradients, int tag);
  // For zero_hooks.h: after the last update() of an iteration. If an update has thrown, wait()
  // throws on every rank. Collective; does not wait.
  void end_updates();
  // Returns when the parameters that update() sent, or step() with overlap_forward, have arrived on
  // this rank. Notices groups added through the base class. Collective.
  void wait();

  // Adds a group and divides its parameters among the ranks, given what each already owns. A group
  // added through the base class is noticed at the next collective call. Collective.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  // Gathers the state of all ranks on rank `to` and returns it there; the other ranks get nothing.
  // It stays available through state_dict() until the next step. Collective.
  std::optional<StateDict> consolidate_state_dict(int to = 0);
  // The state that was consolidated on this rank, or that of an optimizer without any state yet.
  // Throws RuntimeError otherwise.
  StateDict state_dict() const;
  // Loads a state dict of a plain optimizer, or one consolidated at any world size; this rank keeps
  // its share. If the dict does not fit, throws a ValueError that says why, and changes nothing.
  void load_state_dict(const StateDict& dict);

  // Writes a checkpoint (checkpoint.h); each rank writes what it owns. An existing checkpoint in
  // the directory stays until the new one is complete, also if this fails. Waits for the previous
  // save first. In "runs/{step}", or "runs/{step:06d}", `{step}` stands for that value of `extra`;
  // the link runs/latest then points at the last complete checkpoint. Collective.
  void save_checkpoint(const std::string& directory, const CheckpointOptions& options = {});
  // Returns when the last save is complete, or throws what went wrong on any rank. Collective.
  void wait_checkpoint();
  CheckpointProgress checkpoint_progress() const;
  // How many bytes of the shards the last load_checkpoint read on this rank.
  int64_t checkpoint_bytes_read() const;
  // Loads a checkpoint of any world size and sharding; each rank reads what it needs. Returns what
  // was saved as `extra`. If something does not fit or is damaged, throws a ValueError that names
  // it on every rank, and changes nothing. Collective.
  NamedValues load_checkpoint(const std::string& directory, const CheckpointOptions& options = {});

  // For torch::save and torch::load, in the format of the plain torch::optim class. Saves what was
  // consolidated on this rank.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // A rank without inputs does its share of the others' steps, in stage 1 with gradients of the
  // lowest rank that has inputs.
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override;
  at::Device join_device() const override;
  ProcessGroupPtr join_process_group() const override { return process_group(); }

  // Where this rank's time and memory went, and what it has sent, since the last reset_stats().
  OptimizerStats stats() const;
  void reset_stats();

  // Whether the parameter belongs to this optimizer.
  bool has(const at::Tensor& param) const {
    return index_of_.count(param.unsafeGetTensorImpl()) > 0;
  }
  // The local optimizer of a param group. Its parameters are what this rank owns.
  torch::optim::Optimizer& optim(size_t group = 0) { return *member_of(group).optim; }
  const ShardEngine& engine() const { return *engine_; }
  const ProcessGroupPtr& process_group() const;
  int rank() const { return process_group()->getRank(); }
  int world_size() const { return process_group()->getSize(); }
  // This rank in the default group.
  int global_rank() const { return shardstep::global_rank(process_group(), rank()); }
  bool parameters_as_bucket_view() const;
  bool overlap_with_ddp() const;
  // Bytes of optimizer state that this rank holds.
  int64_t local_state_bytes() const;

 private:
  using GroupOptions = std::vector<std::unique_ptr<torch::optim::OptimizerOptions>>;
  // A local optimizer. Groups with options of another type than the constructor's have another.
  struct Member {
    LocalOptimizer local;
    std::unique_ptr<torch::optim::Optimizer> optim;  // null as long as it has no groups
  };
  struct GroupPlace {
    size_t member = 0;
    size_t position = 0;  // among the member's groups
  };
  struct LoadedState {
    size_t group;
    void* key;  // the local parameter's TensorImpl
    std::unique_ptr<torch::optim::OptimizerParamState> state;
  };
  using ParamStates = std::vector<LoadedState>;
  // By parameter, see ShardEngine::load_masters.
  using Masters = std::map<int64_t, at::Tensor>;

  // `error` is what has kept this rank from adding them.
  void add_groups(std::vector<torch::optim::OptimizerParamGroup> groups,
                  std::exception_ptr error = nullptr);
  Member& member_of(size_t group) { return members_[places_[group].member]; }
  const LocalOptimizer& local_of(size_t group) const {
    return members_[places_[group].member].local;
  }
  torch::optim::OptimizerParamGroup& local_group(size_t group) {
    return member_of(group).optim->param_groups()[places_[group].position];
  }
  // The member whose options have this type; a new one if there is none yet.
  size_t member_for(const torch::optim::OptimizerOptions& options);
  EngineGroup describe_group(size_t group);
  void make_local_groups(size_t known);
  at::Tensor step_members(const LossClosure& closure);
  bool is_known_elementwise_group(size_t group) const;
  void adopt_new_groups(std::exception_ptr error);
  void forget_groups_from(size_t known);
  std::vector<ParamGradient> by_index(const ParamsAndGradients& gradients) const;
  // Once in a step: ranks that have joined make their share of it from here on.
  void announce();
  // The update of what this rank owns, in step().
  at::Tensor update_own(const LossClosure& closure);
  void take_gradients(bool first_in_step);
  void check_groups() const;
  void push_options();
  void pull_options();
  std::map<int64_t, NamedValues> read_local_state() const;
  bool has_state_from_the_start() const;
  StateDict whole_state_dict(const std::map<int64_t, std::vector<StateValue>>& state) const;
  // Makes these the options and the whole state.
  void take(const GroupOptions& options, ParamStates& states, const Masters& masters);
  // Turns what was loaded for a local parameter into the local optimizer's state and a master.
  void add_state(size_t group, const LocalParam& param, NamedValues values, ParamStates& states,
                 Masters& masters) const;
  std::unique_ptr<torch::optim::Optimizer> make_plain() const;

  std::unique_ptr<ShardEngine> engine_;
  std::unique_ptr<Checkpointer> checkpointer_;
  std::shared_ptr<torch::nn::Module> module_;
  bool broadcast_buffers_;
  std::vector<Member> members_;     // the first is the constructor's
  std::vector<GroupPlace> places_;  // by param group
  int64_t sent_before_ = 0, received_before_ = 0, shared_before_ = 0;  // bytes, at reset_stats()
  std::optional<StateDict> consolidated_;
  bool announced_ = false;
  bool has_joined_ = false;             // a Join whose other ranks have inputs left
  bool only_owners_have_sums_ = false;  // reduce_to_owners() was called
  bool may_have_state_ = false;         // on any rank, besides the state that optimizers start with
  std::unordered_map<const void*, int64_t> index_of_;  // by the parameter's TensorImpl
  std::vector<std::unique_ptr<Pending>> arriving_;     // what update() sent
  std::exception_ptr update_error_;                    // what the first update() to fail threw
};

}  // namespace shardstep
