#include "shardstep/zero_hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <deque>

#include "comm/collectives.h"
#include "comm/exchange.h"
#include "ddp/overlapped_step.h"
#include "ddp/side_streams.h"
#include "failure_points.h"
#include "launch/who.h"
#include "shard/shard_engine.h"

namespace shardstep {
namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

at::Tensor tensor_in(const c10::IValue& result) {
  return result.isTensor() ? result.toTensor() : result.toTensorVector().front();
}

// Averages buckets on the owners of their parameters, on the thread that runs the backward pass.
// Gloo does not report when a message has arrived, so a bucket is waited for when a later one is
// full.
class ReductionToOwners {
 public:
  ReductionToOwners(DistributedDataParallelBase& ddp, ZeroRedundancyOptimizer& zero)
      : ddp_(ddp), zero_(zero) {}

  FuturePtr reduce(c10d::GradBucket& bucket) {
    if (bucket.getIndex() == 0) {
      finish(0);  // what a backward pass that threw left behind
      zero_.wait();
    }
    reducing_.push_back(start(bucket));
    const auto future = reducing_.back().future;
    // Where ranks may use different parameters, one that waits here could keep another from
    // reaching its bucket.
    if (!ddp_.options().find_unused_parameters()) finish(kAhead);
    if (bucket.isLast()) {
      // The first pass of a static graph is reduced when it has ended.
      const bool ended = ddp_.options().static_graph() && !std::exchange(graph_known_, true);
      if (torch::autograd::get_current_graph_task_id() != -1 && !ended) {
        // Before DDP's own, which waits for the futures.
        torch::autograd::Engine::get_default_engine().queue_callback([this] { finish(0); });
      } else {
        finish(0);
      }
    }
    return future;
  }

 private:
  // How many buckets may be under way while the backward pass continues.
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
        gradients.emplace_back(params[i], buffer.as_strided(params[i].sizes(), params[i].strides(),
                                                            views[i].storage_offset()));
      } else {
        std::vector<at::Tensor> average{
            buffer.as_strided({params[i].numel()}, {1}, views[i].storage_offset())};
        average[0].div_(zero_.world_size());
        reducing.works.push_back(zero_.process_group()->allreduce(average));
      }
    }
    reducing.to_owners = zero_.reduce_to_owners(gradients, static_cast<int>(bucket.getIndex()));
    SHARDSTEP_FAILURE_POINT("owners: started");
    return reducing;
  }

  // Finishes all but the last `left` buckets.
  void finish(size_t left) {
    while (reducing_.size() > left) {
      const auto front = std::move(reducing_.front());
      reducing_.pop_front();
      // Whoever uses the future's value waits for this stream.
      side_streams_.run(front.buffer.device(), [&] {
        if (front.to_owners) front.to_owners->wait();
        for (const auto& work : front.works) {
          detail::wait_for_all_ranks(zero_.process_group(), work, "averaging over");
        }
        SHARDSTEP_FAILURE_POINT("owners: reduced");
        front.future->markCompleted(front.buffer);
      });
    }
  }

  DistributedDataParallelBase& ddp_;
  ZeroRedundancyOptimizer& zero_;
  std::deque<Reducing> reducing_;
  detail::SideStreams side_streams_;
  bool graph_known_ = false;
};

CommHook make_hook(CommHook hook, DistributedDataParallelBase& ddp, ZeroRedundancyOptimizer& zero,
                   UpdateWhen when) {
  const auto who = detail::who(zero.process_group());
  TORCH_CHECK_TYPE(hook, "shardstep: expected a hook that reduces, got an empty function", who);
  TORCH_CHECK_VALUE(zero.overlap_with_ddp(),
                    "shardstep: expected an optimizer with overlap_with_ddp, got one without", who);
  const OverlappedStepOptions options{
      .update = when,
      .static_graph = ddp.options().static_graph(),
      .find_unused_parameters = ddp.options().find_unused_parameters(),
      .any_order = zero.engine().any_order()};
  auto step = std::make_shared<OverlappedStep>(
      options,
      OverlappedUpdate{[&zero](const auto& gradients, int tag) { zero.update(gradients, tag); },
                       [&zero] { zero.end_updates(); }, [&zero] { zero.wait(); }});
  ddp.register_forward_pre_hook([step] { step->arrive(); });
  return [step, hook = std::move(hook)](c10d::GradBucket& bucket) {
    const auto future = hook(bucket);
    step->reducing(bucket, {[future] { return future->completed(); },
                            [future] {
                              future->wait();
                              return tensor_in(future->value());
                            }});
    return future;
  };
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
  return make_hook(std::move(hook), ddp, zero, UpdateWhen::kLastBucket);
}

CommHook hook_with_zero_step_interleaved(CommHook hook, DistributedDataParallelBase& ddp,
                                         ZeroRedundancyOptimizer& zero, bool) {
  return make_hook(std::move(hook), ddp, zero, UpdateWhen::kEachBucket);
}

}  // namespace shardstep
