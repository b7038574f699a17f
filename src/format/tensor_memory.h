#pragma once

// Whether a tensor's elements can be read as bytes.

#include <ATen/ATen.h>

#include <string>

namespace shardstep::detail {

constexpr const char* kWithMemory = "a dense tensor with memory of its own";

// Whether the tensor has memory for its elements. Sparse tensors, tensors on the meta device and
// Python subclasses that dispatch to other tensors (quantized state, DTensor) do not.
inline bool has_memory(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_meta() &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

// What has_memory refused, for errors.
inline std::string describe_memory(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  if (tensor.unsafeGetTensorImpl()->is_python_dispatch()) {
    return "a tensor subclass that holds its elements elsewhere; save that optimizer's state with "
           "consolidate_state_dict() and torch.save";
  }
  return c10::str("a tensor of layout ", tensor.layout(), " on ", tensor.device());
}

}  // namespace shardstep::detail
