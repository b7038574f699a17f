#pragma once

#include <memory>

#include "comm/exchange.h"

namespace shardstep::detail {

// Moves parts by the backend's own collectives, on any device. REQUIRES: more than one rank.
std::unique_ptr<Exchange> make_native_exchange(const ProcessGroupPtr& group, int64_t channel);

}  // namespace shardstep::detail
