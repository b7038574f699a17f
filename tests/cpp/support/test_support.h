#pragma once

// Runs ranks as threads of this process, on real Gloo, or on simccl if the tests' device is the
// simulated one, with a time limit.

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "shardstep/process_group.h"
#include "support/full_run.h"

namespace shardstep::test {

// Runs body(group) on each rank, a thread per rank. Prints every exception that a rank let
// through and rethrows the earliest, which is the cause of those that follow from it. A run that
// takes longer than `limit`, times patience(), aborts the process with a message.
void run_ranks(int world_size, const std::function<void(const ProcessGroupPtr&)>& body,
               std::chrono::seconds limit = std::chrono::seconds(120),
               std::chrono::milliseconds timeout = patience() * std::chrono::seconds(30));

// Names the host of each rank ("a,a,b") for groups that are made in its lifetime: ranks of
// different hosts do not share memory. An empty string leaves them on one host.
class Hosts {
 public:
  explicit Hosts(const std::string& names);
  ~Hosts();
  Hosts(const Hosts&) = delete;
  Hosts& operator=(const Hosts&) = delete;
};

// The ranks of each host, in order of the hosts' lowest ranks.
std::vector<std::vector<int>> ranks_by_host(const std::string& names, int world_size);

// What arrives of a gradient that is sent in `wire`, in its own dtype: itself, if that is unset;
// for int8, what is documented of its blocks, step by step.
at::Tensor as_sent(const at::Tensor& gradient, std::optional<at::ScalarType> wire);

// Random numbers of one's own: torch::manual_seed is shared by all ranks that are threads.
at::Generator generator(uint64_t seed);

}  // namespace shardstep::test
