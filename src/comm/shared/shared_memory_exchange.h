#pragma once

#include <memory>

#include "comm/exchange.h"
#include "comm/shared/shared_memory.h"

namespace shardstep::detail {

// Moves parts through memory that the ranks of one host share. REQUIRES: more than one rank, all on
// one host; tensors on the CPU. Collective.
std::unique_ptr<Exchange> make_shared_memory_exchange(const ProcessGroupPtr& group, int64_t channel,
                                                      std::shared_ptr<SharedMemory> shared);

}  // namespace shardstep::detail
