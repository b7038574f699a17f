#pragma once

// What differs between the versions of torch that we build with, 2.12 to 2.15. Nothing else looks
// at torch's version.

#include <torch/csrc/autograd/variable.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace shardstep::detail {

// Keeps a parameter's gradient accumulator alive: shared up to 2.12, intrusive after.
using GradAccumulatorPtr =
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

// A node of the autograd graph, in the pointer that the graph holds: shared up to 2.12, intrusive
// after.
template <class Node, class... Args>
auto make_node(Args&&... args) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
  return std::make_shared<Node>(std::forward<Args>(args)...);
#else
  return c10::make_intrusive<Node>(std::forward<Args>(args)...);
#endif
}

// As hasBackendForDeviceType, which 2.12 does not have.
inline bool has_backend_for(const c10d::ProcessGroup& group, at::DeviceType type) {
  const auto devices = group.getDeviceTypes();
  return std::any_of(devices.begin(), devices.end(),
                     [&](const at::Device& device) { return device.type() == type; });
}

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Collective: `whole` becomes every rank's `own`, in rank order.
inline WorkPtr all_gather_single(c10d::ProcessGroup& group, at::Tensor& whole, at::Tensor& own) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
  return group._allgather_base(whole, own);
#else
  return group.all_gather_single(whole, own);
#endif
}

// Collective: `sum` becomes the sum of this rank's part of every rank's `whole`.
inline WorkPtr reduce_scatter_single(c10d::ProcessGroup& group, at::Tensor& sum,
                                     at::Tensor& whole) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
  return group._reduce_scatter_base(sum, whole);
#else
  return group.reduce_scatter_single(sum, whole);
#endif
}

// Collective: rank r gets the r-th part of every rank's `input`.
inline WorkPtr all_to_all_single(c10d::ProcessGroup& group, at::Tensor& output, at::Tensor& input,
                                 std::vector<int64_t>& received_numel,
                                 std::vector<int64_t>& sent_numel) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
  return group.alltoall_base(output, input, received_numel, sent_numel);
#else
  return group.all_to_all_single(output, input, received_numel, sent_numel);
#endif
}

}  // namespace shardstep::detail
