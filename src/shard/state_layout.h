#pragma once

// How a parameter's optimizer state is divided as the parameter is.

#include <ATen/ATen.h>

#include <string>

#include "shard/partition.h"

namespace shardstep::detail {

// Whether a local state tensor is the part of a whole one that belongs to a slice of a parameter.
inline bool is_cut(const at::Tensor& tensor, Range elements, Sharding sharding) {
  return sharding == Sharding::kElement && tensor.dim() == 1 && tensor.numel() == elements.size();
}

// Whether a whole state tensor has one element for each of the parameter's. A step counter never
// has, also not for a parameter without axes.
inline bool like_param(const std::string& key, at::IntArrayRef sizes, const at::Tensor& param) {
  return key != "step" && sizes == param.sizes();
}

// The dtype that state of the parameter's shape has once it is loaded.
inline at::ScalarType state_dtype(at::ScalarType dtype, const at::Tensor& param) {
  return param.is_floating_point() && at::isFloatingType(dtype) ? param.scalar_type() : dtype;
}

}  // namespace shardstep::detail
