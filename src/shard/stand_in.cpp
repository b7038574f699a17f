#include "shard/stand_in.h"

#include <ATen/OpaqueTensorImpl.h>
#include <torch/library.h>

namespace shardstep {
namespace {

// No backend has this key, so every operation on such a tensor reaches the fallback below.
constexpr auto kStandInKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// torch's Optimizer::zero_grad() detaches a gradient before it drops it.
void refuse_operation(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  if (name == "aten::detach_") return;  // leaves its argument as the result
  TORCH_CHECK(name != "aten::zero_",
              "shardstep: expected zero_grad() of ZeroRedundancyOptimizer for gradients that are "
              "divided among the ranks (stage 2), got aten::zero_ on one, as the base class's "
              "zero_grad(false) calls it");
  TORCH_CHECK(false, "shardstep: expected a whole gradient, got ", name,
              " on one that is divided among the ranks (stage 2); call clip_grad_norm_(), "
              "clip_grad_value_() or full_gradient() of the optimizer instead");
}

}  // namespace

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_operation>());
}

at::Tensor make_stand_in(const at::Tensor& param, int64_t index) {
  return at::detail::make_tensor<at::OpaqueTensorImpl<int64_t>>(
      c10::DispatchKeySet(kStandInKey), param.dtype(), param.device(), index, param.sizes());
}

}  // namespace shardstep
