#pragma once

// Which exchange a group uses.

#include <memory>

#include "comm/exchange.h"
#include "shardstep/export.h"
#include "shardstep/sharding.h"

namespace shardstep {

struct ExchangeOptions {
  ExchangeKind kind = ExchangeKind::kAuto;
  at::Device device = at::kCPU;
  // Keeps the messages of exchanges that share a group apart; the ranks agree on it.
  int64_t channel = 0;
};

// REQUIRES: the group has more than one rank. Collective.
SHARDSTEP_API std::unique_ptr<Exchange> make_exchange(const ProcessGroupPtr& group,
                                                      const ExchangeOptions& options);

}  // namespace shardstep
