#pragma once

// How each rank's update in a step went. A rank whose update has thrown still sends its parameters,
// and this along with them: so every rank hears of it in the same step, and none waits in vain.
// Thread safety: one thread at a time.

#include <exception>
#include <string>

#include "comm/parts.h"
#include "shardstep/process_group.h"

namespace shardstep::detail {

class StepOutcome {
 public:
  explicit StepOutcome(ProcessGroupPtr group) : group_(std::move(group)) {}

  // What to gather from all ranks, on `device`; `error` is what this rank's update has thrown, if
  // anything. `summary` must be the same on every rank.
  const Parts& of_this_rank(at::Device device, const std::exception_ptr& error,
                            int64_t summary = 0);
  // Throws if a rank has failed or has another summary. A rank that has failed itself throws its
  // own error instead of this. REQUIRES: what of_this_rank gave has been gathered.
  void check() const;

 private:
  ProcessGroupPtr group_;
  at::Tensor messages_;  // one per rank, side by side: the summary, then a text if it has failed
  Parts parts_;
};

}  // namespace shardstep::detail
