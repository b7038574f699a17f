#include "shardstep/zero_hooks.h"

#include "shardstep/overlapped_step.h"
#include "who.h"

namespace shardstep {
namespace {

at::Tensor tensor_in(const c10::IValue& result) {
  return result.isTensor() ? result.toTensor() : result.toTensorVector().front();
}

CommHook make_hook(CommHook hook, DistributedDataParallelBase& ddp, ZeroRedundancyOptimizer& zero,
                   UpdateWhen when) {
  const auto who = detail::who(zero.process_group());
  TORCH_CHECK_TYPE(hook, "shardstep: expected a hook that reduces, got an empty function", who);
  TORCH_CHECK_VALUE(zero.overlap_with_ddp(),
                    "shardstep: expected an optimizer with overlap_with_ddp, got one without", who);
  const OverlappedStepOptions options{
      .update = when,
      .static_graph = ddp.options().static_graph(),
      .find_unused_parameters = ddp.options().find_unused_parameters()};
  auto step = std::make_shared<OverlappedStep>(
      options,
      OverlappedUpdate{[&zero](const auto& gradients, int tag) { zero.update(gradients, tag); },
                       [&zero] { zero.wait(); }});
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

CommHook hook_with_zero_step(CommHook hook, DistributedDataParallelBase& ddp,
                             ZeroRedundancyOptimizer& zero, bool) {
  return make_hook(std::move(hook), ddp, zero, UpdateWhen::kLastBucket);
}

CommHook hook_with_zero_step_interleaved(CommHook hook, DistributedDataParallelBase& ddp,
                                         ZeroRedundancyOptimizer& zero, bool) {
  return make_hook(std::move(hook), ddp, zero, UpdateWhen::kEachBucket);
}

}  // namespace shardstep
