#include "comm/collectives.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "comm/pending_works.h"
#include "failure_points.h"

namespace shardstep::detail {
namespace {

// Tensors of one dtype and device that travel together.
struct Batch {
  std::vector<at::Tensor> tensors;
  size_t bytes = 0;

  bool has_room_for(const at::Tensor& tensor) const {
    constexpr size_t kMostBytes = 250 << 20;
    const auto& first = tensors.front();
    return first.dtype() == tensor.dtype() && first.device() == tensor.device() &&
           bytes + tensor.nbytes() <= kMostBytes;
  }
};

std::vector<Batch> batches_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Batch> batches;
  for (const auto& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    auto batch = std::find_if(batches.begin(), batches.end(),
                              [&](const Batch& other) { return other.has_room_for(tensor); });
    if (batch == batches.end()) batch = batches.emplace(batches.end());
    batch->tensors.push_back(tensor);
    batch->bytes += tensor.nbytes();
  }
  return batches;
}

std::unique_ptr<Pending> start_broadcast(const ProcessGroupPtr& group,
                                         const std::vector<at::Tensor>& tensors, int source) {
  std::vector<at::Tensor> flat{at::flatten_dense_tensors(tensors)};
  auto pending = std::make_unique<PendingWorks>(group);
  SHARDSTEP_FAILURE_POINT("broadcast: begins");
  c10d::BroadcastOptions options;
  options.rootRank = source;
  pending->add(group->broadcast(flat, options), "broadcasting to", kAllRanks);
  SHARDSTEP_FAILURE_POINT("broadcast: sent");
  pending->keep(flat);
  pending->then([tensors, flat] {
    const auto arrived = at::unflatten_dense_tensors(flat.front(), tensors);
    for (size_t i = 0; i < tensors.size(); ++i) tensors[i].copy_(arrived[i]);
  });
  return pending;
}

}  // namespace

void wait_for_all_ranks(const ProcessGroupPtr& group, c10::intrusive_ptr<c10d::Work> work,
                        const char* verb) {
  PendingWorks pending(group);
  pending.add(std::move(work), verb, kAllRanks);
  pending.wait();
}

void broadcast(const ProcessGroupPtr& group, const std::vector<at::Tensor>& tensors, int source) {
  if (group->getSize() == 1) return;
  at::NoGradGuard no_grad;
  // Each has a flat copy, so only the next one is under way while one arrives.
  std::unique_ptr<Pending> before;
  for (const auto& batch : batches_of(tensors)) {
    auto pending = start_broadcast(group, batch.tensors, source);
    if (before) before->wait();
    before = std::move(pending);
  }
  if (before) before->wait();
}

}  // namespace shardstep::detail
