#pragma once

#include <memory>

#include "comm/exchange.h"

namespace shardstep::detail {

// Moves parts through memory that the ranks of one host share. Null if the ranks do not share
// memory, or tensors are not in it. REQUIRES: more than one rank. Collective.
std::unique_ptr<Exchange> make_shared_memory_exchange(const ProcessGroupPtr& group,
                                                      at::Device device, int64_t channel);

}  // namespace shardstep::detail
