#pragma once

// Collectives of c10d whose errors say which ranks are gone, and who raised it. They end when a
// rank is lost, not at the group's timeout. Thread safety: as the process group.

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <vector>

#include "shardstep/export.h"
#include "shardstep/process_group.h"

namespace shardstep::detail {

// Waits for a collective that needs every rank. `verb` is what it does, as in "waiting for".
void wait_for_all_ranks(const ProcessGroupPtr& group, c10::intrusive_ptr<c10d::Work> work,
                        const char* verb);

// Gives the values of rank `source` to every rank, small tensors together. Collective.
SHARDSTEP_API void broadcast(const ProcessGroupPtr& group, const std::vector<at::Tensor>& tensors,
                             int source = 0);

}  // namespace shardstep::detail
