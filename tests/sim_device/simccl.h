#pragma once

// "simccl", a c10d backend for the simulated device that behaves as NCCL does where it hurts:
// - it takes tensors of the device only, contiguous ones, and is the only backend of its group;
// - ranks must make the same calls in the same order. Each call carries its number, operation, size
//   and dtype; where ranks differ, all of them throw, from then on too;
// - results arrive at wait(), or where a stream waits for the future's event. Until then outputs
//   hold NaN (0xff), and if an input or an output was changed in the meantime, wait() throws;
// - send and receive are matched in order for each pair of ranks.
//
// Calls of one group run in a thread of its own, over Gloo, one after the other. Sums are taken in
// rank order. Thread safety: as c10d's backends, one thread at a time.

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <map>
#include <string>
#include <vector>

namespace sim {

// What one rank has called so far. A coalesced call is one call.
struct Traffic {
  int64_t calls = 0;
  int64_t bytes = 0;  // of the larger of input and output
};
using TrafficByOperation = std::map<std::string, Traffic>;

c10::intrusive_ptr<c10d::Backend> make_simccl(const c10::intrusive_ptr<c10d::Store>& store,
                                              int rank, int size, std::chrono::milliseconds timeout,
                                              const std::vector<uint64_t>& global_ranks = {});

// A group that has simccl and no other backend, as init_process_group("nccl") makes it.
c10::intrusive_ptr<c10d::ProcessGroup> make_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int size,
                                                  std::chrono::milliseconds timeout);

// REQUIRES: a group with simccl.
TrafficByOperation traffic(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace sim
