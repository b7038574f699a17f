#include "shardstep/zero_hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <deque>
#include <unordered_set>

#include "who.h"

namespace shardstep {
namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

enum class When { kEachBucket, kLastBucket };

at::Tensor tensor_in(const c10::IValue& result) {
  return result.isTensor() ? result.toTensor() : result.toTensorVector().front();
}

// `reduced` is like the bucket's buffer: the part of it that holds a parameter's gradient.
at::Tensor gradient_in(const at::Tensor& reduced, const at::Tensor& buffer, const at::Tensor& view,
                       const at::Tensor& param) {
  return reduced.as_strided(
      param.sizes(), param.strides(),
      reduced.storage_offset() + view.storage_offset() - buffer.storage_offset());
}

bool inside_backward_pass() { return torch::autograd::get_current_graph_task_id() != -1; }

// Which parameters no rank used, DDP finds out when the backward pass ends.
bool finds_unused(const DistributedDataParallelBase& ddp) {
  return ddp.options().find_unused_parameters() && !ddp.options().static_graph();
}

// Averages buckets on the owners of their parameters, on the thread that runs the backward pass:
// Gloo does not tell when a message has arrived, so a bucket is waited for when a later one is
// full.
class ReductionToOwners {
 public:
  ReductionToOwners(DistributedDataParallelBase& ddp, ZeroRedundancyOptimizer& zero)
      : ddp_(ddp), zero_(zero) {}

  FuturePtr reduce(c10d::GradBucket& bucket) {
    if (bucket.getIndex() == 0) {
      finish(0);  // what a backward pass that threw has left
      zero_.wait();
    }
    reducing_.push_back(start(bucket));
    const auto future = reducing_.back().future;
    // Where ranks may use different parameters, one that waits here could keep another from getting
    // to its bucket.
    if (!finds_unused(ddp_)) finish(kAhead);
    if (bucket.isLast()) {
      // The first pass of a static graph is reduced when it has ended.
      const bool ended = ddp_.options().static_graph() && !std::exchange(graph_known_, true);
      if (inside_backward_pass() && !ended) {
        // Before DDP's own, which waits for the futures.
        torch::autograd::Engine::get_default_engine().queue_callback([this] { finish(0); });
      } else {
        finish(0);
      }
    }
    return future;
  }

 private:
  // So many buckets may be on their way when the backward pass goes on.
  static constexpr size_t kAhead = 1;

  struct Reducing {
    FuturePtr future;
    at::Tensor buffer;
    std::unique_ptr<Pending> to_owners;                 // null in a group of one
    std::vector<c10::intrusive_ptr<c10d::Work>> works;  // of parameters that have no owner
  };

  Reducing start(c10d::GradBucket& bucket) {
    const auto buffer = bucket.getBuffer();
    TORCH_CHECK_VALUE(buffer.layout() == at::kStrided,
                      "shardstep: expected dense gradients to reduce to owners, got ",
                      buffer.layout(), detail::who(zero_.process_group()));
    std::vector<at::Device> devices;
    if (!buffer.is_cpu()) devices.push_back(buffer.device());
    Reducing reducing{
        c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), std::move(devices)),
        buffer,
        nullptr,
        {}};
    const auto params = bucket.getParameters();
    const auto views = bucket.getGradients();
    ParamsAndGradients gradients;
    for (size_t i = 0; i < params.size(); ++i) {
      if (zero_.has(params[i])) {
        gradients.emplace_back(params[i], gradient_in(buffer, buffer, views[i], params[i]));
      } else {
        std::vector<at::Tensor> average{
            buffer.as_strided({params[i].numel()}, {1}, views[i].storage_offset())};
        average[0].div_(zero_.world_size());
        reducing.works.push_back(zero_.process_group()->allreduce(average));
      }
    }
    reducing.to_owners = zero_.reduce_to_owners(gradients, static_cast<int>(bucket.getIndex()));
    return reducing;
  }

  // All but the last `left` buckets.
  void finish(size_t left) {
    while (reducing_.size() > left) {
      const auto front = std::move(reducing_.front());
      reducing_.pop_front();
      if (front.to_owners) front.to_owners->wait();
      for (const auto& work : front.works) work->wait();
      front.future->markCompleted(front.buffer);
    }
  }

  DistributedDataParallelBase& ddp_;
  ZeroRedundancyOptimizer& zero_;
  std::deque<Reducing> reducing_;
  bool graph_known_ = false;
};

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
    if (bucket.getIndex() == 0) {
      reducing_.clear();  // what a backward pass that threw has left
      zero_.wait();
    }
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
    return finds_unused(ddp_) || (ddp_.options().static_graph() && !graph_known_);
  }

  // At the end of the backward pass. A rank that has joined has none: it finishes at once, or, if
  // it must wait for DDP to decide, before the next forward.
  void finish_later() {
    const bool behind_ddp = ddp_decides_at_the_end();
    if (!inside_backward_pass()) {
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
      ParamsAndGradients gradients;
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

  ParamsAndGradients gradients_of(const Reducing& bucket) const {
    const auto reduced = tensor_in(bucket.future->value());
    ParamsAndGradients gradients;
    for (size_t i = 0; i < bucket.params.size(); ++i) {
      const auto& param = bucket.params[i];
      if (unused_.count(param.unsafeGetTensorImpl()) > 0) continue;
      if (ddp_decides_at_the_end()) {
        gradients.emplace_back(param, param.grad());
        continue;
      }
      gradients.emplace_back(param,
                             gradient_in(reduced, bucket.buffer, bucket.gradients[i], param));
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

CommHook reduce_to_owners_hook(DistributedDataParallelBase& ddp, ZeroRedundancyOptimizer& zero) {
  const auto& group = ddp.process_group();
  TORCH_CHECK_VALUE(group->getSize() == zero.world_size() && group->getRank() == zero.rank(),
                    "shardstep: expected DistributedDataParallel and the optimizer on the same "
                    "ranks, got ",
                    detail::who(group), " and", detail::who(zero.process_group()));
  auto reduction = std::make_shared<ReductionToOwners>(ddp, zero);
  return [reduction](c10d::GradBucket& bucket) { return reduction->reduce(bucket); };
}

CommHook hook_with_zero_step(CommHook hook, DistributedDataParallelBase& ddp,
                             ZeroRedundancyOptimizer& zero, bool) {
  return make_hook(std::move(hook), ddp, zero, When::kLastBucket);
}

CommHook hook_with_zero_step_interleaved(CommHook hook, DistributedDataParallelBase& ddp,
                                         ZeroRedundancyOptimizer& zero, bool) {
  return make_hook(std::move(hook), ddp, zero, When::kEachBucket);
}

}  // namespace shardstep
