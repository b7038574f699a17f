#pragma once

#include <memory>

#include "comm/exchange.h"
#include "comm/shared/shared_memory.h"

namespace shardstep::detail {

// Moves parts through shared memory inside a host and by messages between hosts, so that a byte
// crosses a host's link once and not once per rank. Hosts may have any number of ranks. Sums are
// taken per host in rank order, then over hosts in order of their lowest ranks. Inside a host
// nothing is rounded; ReductionOptions::wire is what each host's sum is rounded to, the owner's
// host's too. REQUIRES: more than one rank; tensors on the CPU. Collective.
std::unique_ptr<Exchange> make_hierarchical_exchange(const ProcessGroupPtr& group, int64_t channel,
                                                     std::shared_ptr<SharedMemory> shared);

}  // namespace shardstep::detail
