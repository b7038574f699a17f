#pragma once

// Process groups, made from the launcher's environment variables or from a given store. Thread
// safety: the default group is set once, by init_process_group; reading it is safe from any thread.
// Collective: init_process_group, new_group, make_process_group.

#include <torch/arg.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "shardstep/export.h"

namespace shardstep {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

struct ProcessGroupOptions {
  // "gloo" for CPU tensors; "nccl" for CUDA tensors, with Gloo for CPU ones; "" for "nccl" if this
  // libtorch has it and finds a GPU, and "gloo" otherwise.
  TORCH_ARG(std::string, backend) = "";
  // How long one communication, or waiting for all ranks to start, may take before it fails.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::minutes(30);
};

// Makes the default group from the environment of torchrun, OpenMPI's mpirun or srun; without a
// launcher, a group of one. REQUIRES: no default group yet. Collective.
SHARDSTEP_API ProcessGroupPtr init_process_group(const ProcessGroupOptions& options = {});

// The group that init_process_group made. REQUIRES: it was called.
SHARDSTEP_API ProcessGroupPtr default_process_group();

SHARDSTEP_API bool has_default_process_group();

// Forgets the default group, so that another can be made; references to it keep it alive.
SHARDSTEP_API void destroy_process_group();

// A group of some of the parent's ranks: ranks[i] becomes rank i; nullptr on ranks that are not in
// the list, which is an error where a group is expected. No parent means the default group.
// Collective over the parent, with the same `ranks`.
SHARDSTEP_API ProcessGroupPtr
new_group(const std::vector<int>& ranks, const ProcessGroupOptions& options = {},
          const std::optional<ProcessGroupPtr>& parent = std::nullopt);

// The rank in the default group of `rank` in this group.
SHARDSTEP_API int global_rank(const ProcessGroupPtr& group, int rank);

// A group of `size` processes that find each other through `store`. From here on this process
// ignores SIGPIPE, unless it has a handler, so that a rank that dies is an error on the others.
// Collective.
SHARDSTEP_API ProcessGroupPtr make_process_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                 int rank, int size,
                                                 const ProcessGroupOptions& options = {});

}  // namespace shardstep
