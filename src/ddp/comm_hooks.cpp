#include <ATen/ATen.h>

#include "shardstep/distributed_data_parallel.h"

namespace shardstep {
namespace {

// Averages a bucket over the group, in place, sending it as `dtype` (unset: the gradients' own).
CommHook average_as(ProcessGroupPtr group, std::optional<at::ScalarType> dtype) {
  TORCH_CHECK_VALUE(group,
                    "shardstep: expected a process group for a communication hook, got null");
  return [group = std::move(group), dtype](c10d::GradBucket& bucket) {
    const auto buffer = bucket.getBuffer();
    std::vector<at::Tensor> sent{dtype ? buffer.to(*dtype) : buffer};
    sent[0].div_(group->getSize());
    return group->allreduce(sent)->getFuture()->then(
        [buffer, mean = sent[0]](c10::ivalue::Future& future) -> c10::IValue {
          future.value();  // throws if it failed
          if (!mean.is_same(buffer)) buffer.copy_(mean);
          return buffer;
        },
        c10::TensorType::get());
  };
}

}  // namespace

CommHook allreduce_hook(ProcessGroupPtr group) { return average_as(std::move(group), {}); }

CommHook fp16_compress_hook(ProcessGroupPtr group) {
  return average_as(std::move(group), at::kHalf);
}

CommHook bf16_compress_hook(ProcessGroupPtr group) {
  return average_as(std::move(group), at::kBFloat16);
}

}  // namespace shardstep
