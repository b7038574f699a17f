#pragma once

#include <ATen/core/Tensor.h>

namespace sim {

// A CPU tensor over the same memory, with the same sizes and strides.
at::Tensor host_tensor(const at::Tensor& tensor);

}  // namespace sim
