#pragma once

// What an optimizer has done on this rank so far. Nothing here is collective.

#include <cstdint>
#include <map>
#include <string>

namespace shardstep {

struct PhaseStats {
  int64_t calls = 0;
  double seconds = 0;
};

struct OptimizerStats {
  // By phase: post (hands over the gradients of a bucket), reduce (takes its sum; waits for other
  // ranks), compare (waits until all ranks are in step()), update (runs the local optimizer),
  // gather (sends parameters; waits), arrive (with overlap_forward, waits for parameters later).
  // torch.profiler shows the same phases as shardstep::<name>.
  std::map<std::string, PhaseStats> phases;
  std::string exchange;  // "shared_memory", ...; "none" in a group of one
  // By link: in messages of the process group, which with the exchange "hierarchical" are those
  // between hosts; and copied into memory that the ranks of a host share.
  int64_t bytes_sent = 0;
  int64_t bytes_received = 0;
  int64_t bytes_shared = 0;
  int64_t buckets = 0;
  // Bytes that this rank holds: of the optimizer's state, of its part of the gradients (stage 2),
  // and of parameters in flat storage.
  int64_t state_bytes = 0;
  int64_t gradient_bytes = 0;
  int64_t flat_parameter_bytes = 0;
};

}  // namespace shardstep
