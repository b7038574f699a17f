#pragma once

// Trains one module on many ranks: its parameters and buffers start as rank 0's, and each backward
// pass leaves the average of all ranks' gradients in `.grad`. Gradients are reduced in buckets
// while the backward pass continues (c10d::Reducer). Names that exist in Python's torch behave as
// they do there.
// Collective: construction, forward, and the backward pass of its result, except under no_sync.
// Destruction does not communicate. Thread safety: one thread at a time.

#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "shardstep/export.h"
#include "shardstep/join.h"
#include "shardstep/process_group.h"
#include "shardstep/tensor_visitor.h"

namespace c10d {
class Reducer;
}

namespace shardstep {

struct DistributedDataParallelOptions {
  // Unset: the default group.
  TORCH_ARG(std::optional<ProcessGroupPtr>, process_group);
  // Parameters and buffers start as rank 0's. If false, the caller must have made them equal.
  TORCH_ARG(bool, init_sync) = true;
  // Before each forward that follows a synchronised one, buffers become rank 0's.
  TORCH_ARG(bool, broadcast_buffers) = true;
  // Gradients are reduced in buckets of about this size. Unset: 25, and 1 for the first.
  TORCH_ARG(std::optional<double>, bucket_cap_mb);
  // Allows parameters that take no part in an iteration. Walks the graph of what forward returned,
  // whose type must be one that tensor_visitor.h supports.
  TORCH_ARG(bool, find_unused_parameters) = false;
  // Gradients are views of the buckets, which saves a copy and the memory for it.
  TORCH_ARG(bool, gradient_as_bucket_view) = false;
  // The graph is the same in every iteration; finds unused parameters in the first one, and allows
  // a parameter's gradient to arrive in several parts (reentrant checkpointing).
  TORCH_ARG(bool, static_graph) = false;
};

// Reduces one bucket: returns the future of a tensor like bucket.getBuffer(), already averaged.
// Called once per bucket in every backward pass, in the same order on every rank.
using CommHook = std::function<c10::intrusive_ptr<c10::ivalue::Future>(c10d::GradBucket& bucket)>;

// The average over the group, in the gradients' own type.
SHARDSTEP_API CommHook allreduce_hook(ProcessGroupPtr group);
// The same with half the bytes: gradients are sent as float16 or bfloat16.
SHARDSTEP_API CommHook fp16_compress_hook(ProcessGroupPtr group);
SHARDSTEP_API CommHook bf16_compress_hook(ProcessGroupPtr group);

// The part that does not depend on the module's type.
class SHARDSTEP_API DistributedDataParallelBase : public Joinable {
 public:
  DistributedDataParallelBase(DistributedDataParallelBase&&) = delete;
  ~DistributedDataParallelBase() override;

  // During its lifetime, backward passes of what forward returns only accumulate local gradients;
  // the first synchronised one afterwards reduces the sum.
  class SHARDSTEP_API NoSync {
   public:
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    friend class DistributedDataParallelBase;
    explicit NoSync(DistributedDataParallelBase& ddp);
    DistributedDataParallelBase& ddp_;
    bool before_;
  };
  [[nodiscard]] NoSync no_sync() { return NoSync(*this); }

  // Replaces the all-reduce of a bucket. REQUIRES: no hook yet, and no forward yet.
  void register_comm_hook(CommHook hook);
  // Runs before each forward, also on a rank that shadows one, and at the end of a Join: for hooks
  // that still write parameters after the backward pass.
  void register_forward_pre_hook(std::function<void()> hook);

  std::vector<at::Tensor> parameters() const;
  torch::OrderedDict<std::string, at::Tensor> named_parameters() const;
  // The parameters whose gradients are reduced, without duplicates.
  const std::vector<at::Tensor>& trainable_parameters() const;
  void train(bool on = true);
  void eval() { train(false); }
  void zero_grad(bool set_to_none = true);

  const ProcessGroupPtr& process_group() const;
  const DistributedDataParallelOptions& options() const;
  // The parameters of each bucket, in the order in which buckets are reduced. Must not be called
  // from a communication hook, which gets the bucket itself.
  std::vector<std::vector<at::Tensor>> buckets() const;
  // From the second forward on, buckets follow the order in which gradients arrive.
  bool has_rebuilt_buckets() const;

  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override;
  at::Device join_device() const override;
  ProcessGroupPtr join_process_group() const override;

 protected:
  DistributedDataParallelBase(std::shared_ptr<torch::nn::Module> module,
                              const DistributedDataParallelOptions& options);
  void before_forward();
  // `outputs` are the tensors that forward returned, in place; `complete` if all could be found.
  void after_forward(const std::vector<at::Tensor*>& outputs, bool complete);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

namespace detail {

template <class T>
std::shared_ptr<torch::nn::Module> as_module(const std::shared_ptr<T>& module) {
  return module;
}
template <class T>
std::shared_ptr<torch::nn::Module> as_module(const torch::nn::ModuleHolder<T>& module) {
  return module.is_empty() ? nullptr : module.ptr();
}

}  // namespace detail

// `Module` is a module holder (which TORCH_MODULE defines) or a std::shared_ptr to a module.
template <class Module>
class DistributedDataParallel : public DistributedDataParallelBase {
 public:
  // Throws on every rank if the ranks' modules or options differ, or one of them is invalid.
  // Collective.
  explicit DistributedDataParallel(Module module,
                                   const DistributedDataParallelOptions& options = {})
      : DistributedDataParallelBase(detail::as_module(module), options),
        module_(std::move(module)) {}

  // The module's forward, with its arguments and its result. Collective.
  template <class... Args>
  auto forward(Args&&... args) {
    before_forward();
    using Output = std::decay_t<decltype(module_->forward(std::forward<Args>(args)...))>;
    if constexpr (std::is_void_v<Output>) {
      module_->forward(std::forward<Args>(args)...);
      after_forward({}, true);
    } else {
      Output output = module_->forward(std::forward<Args>(args)...);
      std::vector<at::Tensor*> tensors;
      const bool complete =
          detail::for_each_tensor(output, [&](at::Tensor& tensor) { tensors.push_back(&tensor); });
      after_forward(tensors, complete);
      return output;
    }
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  Module& module() { return module_; }
  const Module& module() const { return module_; }

 private:
  Module module_;
};

}  // namespace shardstep
