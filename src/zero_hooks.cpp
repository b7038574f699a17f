#include "shardstep/zero_hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <deque>
#include <unordered_set>

#include "who.h"

namespace shardstep {
namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
using Gradients = std::vector<std::pair<at::Tensor, at::Tensor>>;  // by parameter

enum class When { kEachBucket, kLastBucket };

at::Tensor tensor_in(const c10::IValue& result) {
  return result.isTensor() ? result.toTensor() : result.toTensorVector().front();
}

// A bucket that is being reduced.
struct Reducing {
  int index;
  FuturePtr future;
  at::Tensor buffer;
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> gradients;  // views of the buffer
};

// What one iteration of one hook knows. All of it happens on the thread that runs the backward
// pass.
class OverlappedStep {
 public:
  OverlappedStep(CommHook hook, DistributedDataParallelBase& ddp, ZeroRedundancyOptimizer& zero,
                 When when)
      : hook_(std::move(hook)), ddp_(ddp), zero_(zero), when_(when) {}

  FuturePtr reduce(c10d::GradBucket& bucket) {
    if (bucket.getIndex() == 0) reducing_.clear();  // what a backward pass that threw has left
    auto future = hook_(bucket);
    reducing_.push_back({static_cast<int>(bucket.getIndex()), future, bucket.getBuffer(),
                         bucket.getParameters(), bucket.getGradients()});
    if (when_ == When::kEachBucket && !ddp_decides_at_the_end()) {
      while (!reducing_.empty() && reducing_.front().future->completed()) update_front();
    }
    if (bucket.isLast()) finish_later();
    return future;
  }

  // Returns when the parameters are those of the next iteration.
  void arrive() {
    if (std::exchange(postponed_, false)) finish();
    zero_.wait();
  }

 private:
  // Parameters that no rank used keep the gradient they had, or none. Which these are, DDP finds
  // out when the backward pass ends; in a static graph, when the first one does.
  bool ddp_decides_at_the_end() const {
    return ddp_.options().static_graph() ? !graph_known_ : ddp_.options().find_unused_parameters();
  }

  // At the end of the backward pass. A rank that has joined has none: it finishes at once, or, if
  // it must wait for DDP to decide, before the next forward.
  void finish_later() {
    const bool behind_ddp = ddp_decides_at_the_end();
    if (torch::autograd::get_current_graph_task_id() == -1) {
      postponed_ = behind_ddp;
      if (!behind_ddp) finish();
      return;
    }
    // DDP queues its own callback after this hook; one queued from a callback comes behind it.
    auto& engine = torch::autograd::Engine::get_default_engine();
    engine.queue_callback([this, behind_ddp, &engine] {
      if (behind_ddp) {
        engine.queue_callback([this] { finish(); });
      } else {
        finish();
      }
    });
  }

  void finish() {
    if (ddp_decides_at_the_end()) find_unused();
    if (when_ == When::kEachBucket) {
      while (!reducing_.empty()) update_front();
    } else {
      Gradients gradients;
      for (const auto& bucket : reducing_) {
        bucket.future->wait();
        for (auto& gradient : gradients_of(bucket)) gradients.push_back(std::move(gradient));
      }
      reducing_.clear();
      zero_.update(gradients, 0);
    }
    graph_known_ = true;
  }

  void find_unused() {
    unused_.clear();
    for (const auto& bucket : reducing_) {
      for (const auto& param : bucket.params) {
        if (!param.grad().defined()) unused_.insert(param.unsafeGetTensorImpl());
      }
    }
  }

  void update_front() {
    const auto bucket = std::move(reducing_.front());
    reducing_.pop_front();
    bucket.future->wait();
    zero_.update(gradients_of(bucket), bucket.index);
  }

  Gradients gradients_of(const Reducing& bucket) const {
    const auto reduced = tensor_in(bucket.future->value());
    Gradients gradients;
    for (size_t i = 0; i < bucket.params.size(); ++i) {
      const auto& param = bucket.params[i];
      if (unused_.count(param.unsafeGetTensorImpl()) > 0) continue;
      if (ddp_decides_at_the_end()) {
        gradients.emplace_back(param, param.grad());
        continue;
      }
      const auto& view = bucket.gradients[i];
      const int64_t offset =
          reduced.storage_offset() + view.storage_offset() - bucket.buffer.storage_offset();
      gradients.emplace_back(param, reduced.as_strided(param.sizes(), param.strides(), offset));
    }
    return gradients;
  }

  CommHook hook_;
  DistributedDataParallelBase& ddp_;
  ZeroRedundancyOptimizer& zero_;
  When when_;
  std::deque<Reducing> reducing_;
  std::unordered_set<const void*> unused_;
  bool graph_known_ = false;
  bool postponed_ = false;
};

CommHook make_hook(CommHook hook, DistributedDataParallelBase& ddp, ZeroRedundancyOptimizer& zero,
                   When when) {
  const auto who = detail::who(zero.process_group());
  TORCH_CHECK_TYPE(hook, "shardstep: expected a hook that reduces, got an empty function", who);
  TORCH_CHECK_VALUE(zero.overlap_with_ddp(),
                    "shardstep: expected an optimizer with overlap_with_ddp, got one without", who);
  auto step = std::make_shared<OverlappedStep>(std::move(hook), ddp, zero, when);
  ddp.register_forward_pre_hook([step] { step->arrive(); });
  return [step](c10d::GradBucket& bucket) { return step->reduce(bucket); };
}

}  // namespace

CommHook hook_with_zero_step(CommHook hook, DistributedDataParallelBase& ddp,
                             ZeroRedundancyOptimizer& zero, bool) {
  return make_hook(std::move(hook), ddp, zero, When::kLastBucket);
}

CommHook hook_with_zero_step_interleaved(CommHook hook, DistributedDataParallelBase& ddp,
                                         ZeroRedundancyOptimizer& zero, bool) {
  return make_hook(std::move(hook), ddp, zero, When::kEachBucket);
}

}  // namespace shardstep
