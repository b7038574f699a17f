#pragma once

#include <memory>

#include "comm/exchange.h"

namespace shardstep::detail {

// Moves parts by messages between every two ranks. REQUIRES: more than one rank.
std::unique_ptr<Exchange> make_pairwise_exchange(const ProcessGroupPtr& group, int64_t channel);

}  // namespace shardstep::detail
