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
  // Separates the messages of exchanges that share a group; the same on all ranks.
  int64_t channel = 0;
  // Whether the ranks of a host are to share tensors, also if every rank is alone on its host.
  bool share_tensors = false;
};

// REQUIRES: the group has more than one rank, and a backend for the device. Collective.
SHARDSTEP_API std::unique_ptr<Exchange> make_exchange(const ProcessGroupPtr& group,
                                                      const ExchangeOptions& options);

// For messages that the host reads, in any order if possible, beside an exchange that moves tensors
// of a device. Collective.
SHARDSTEP_API std::unique_ptr<Exchange> make_control_exchange(const ProcessGroupPtr& group,
                                                              int64_t channel);

}  // namespace shardstep
