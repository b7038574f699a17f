#pragma once

// Runs ranks as threads of this process, on real Gloo, with a time limit.

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <functional>
#include <vector>

#include "shardstep/process_group.h"

namespace shardstep::test {

// Runs body(group) once a rank, each in a thread of its own. Prints every exception that a rank let
// through and rethrows the earliest, which is the cause of those that follow from it. A run that
// takes longer than `limit` aborts the process with a message.
void run_ranks(int world_size, const std::function<void(const ProcessGroupPtr&)>& body,
               std::chrono::seconds limit = std::chrono::seconds(120),
               std::chrono::milliseconds timeout = std::chrono::seconds(30));

// Random numbers of one's own: torch::manual_seed is shared by all ranks that are threads.
at::Generator generator(uint64_t seed);

}  // namespace shardstep::test
