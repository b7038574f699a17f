#pragma once

// The group of processes this one belongs to: made from what the launcher put into the environment,
// or from a store handed in. Thread safety: the default group is set once, by init_process_group;
// reading it is safe from any thread. Collective: init_process_group, new_group,
// make_process_group.

#include <torch/arg.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <string>
#include <vector>

#include "shardstep/export.h"

namespace shardstep {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

struct ProcessGroupOptions {
  // "gloo", "nccl", or "" for what this libtorch does best on this machine.
  TORCH_ARG(std::string, backend) = "";
  // How long one communication may take before it fails.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::minutes(30);
};

// A group of `size` processes that meet in `store`. Collective.
SHARDSTEP_API ProcessGroupPtr make_process_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                 int rank, int size,
                                                 const ProcessGroupOptions& options = {});

}  // namespace shardstep
