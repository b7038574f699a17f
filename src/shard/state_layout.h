#pragma once

// How a parameter's optimizer state is divided along with the parameter.

#include <ATen/ATen.h>

#include <string>

#include "shard/partition.h"

namespace shardstep::detail {

// Whether a local state tensor is the part of a whole one that belongs to a slice of a parameter.
inline bool is_cut(const at::Tensor& tensor, Range elements, Sharding sharding) {
  return sharding == Sharding::kElement && tensor.dim() == 1 && tensor.numel() == elements.size();
}

// Whether a whole state tensor has one element per element of the parameter. A step counter never
// has, even for a 0-d parameter.
inline bool like_param(const std::string& key, at::IntArrayRef sizes, const at::Tensor& param) {
  return key != "step" && sizes == param.sizes();
}

// The dtype of state of the parameter's shape after loading. `local` is what the local optimizer
// updates.
inline at::ScalarType state_dtype(at::ScalarType dtype, const at::Tensor& local) {
  return local.is_floating_point() && at::isFloatingType(dtype) ? local.scalar_type() : dtype;
}

}  // namespace shardstep::detail
