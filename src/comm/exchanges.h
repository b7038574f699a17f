#pragma once

// The ways of moving parts. REQUIRES: more than one rank.

#include <memory>

#include "comm/exchange.h"

namespace shardstep::detail {

std::unique_ptr<Exchange> make_native_exchange(const ProcessGroupPtr& group, int64_t channel);
std::unique_ptr<Exchange> make_pairwise_exchange(const ProcessGroupPtr& group, int64_t channel);
// Null if the ranks do not share memory, or tensors are not in it. Collective.
std::unique_ptr<Exchange> make_shared_memory_exchange(const ProcessGroupPtr& group,
                                                      at::Device device, int64_t channel);

}  // namespace shardstep::detail
