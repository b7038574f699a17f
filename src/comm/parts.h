#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace shardstep {

// What each rank owns, as contiguous 1-D tensors; the same shapes on every rank.
using Parts = std::vector<std::vector<at::Tensor>>;

}  // namespace shardstep
