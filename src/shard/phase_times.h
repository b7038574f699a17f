#pragma once

// Where the time of an engine goes, by phase of a step. Each phase is also an event of
// torch.profiler, called shardstep::<name>.
// Thread safety: any thread; readers may see a phase that is half counted.

#include <ATen/record_function.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "shardstep/export.h"

namespace shardstep {

enum class StepPhase : uint8_t {
  kPost,     // handing a bucket's gradients over, in the backward pass
  kReduce,   // taking a bucket's sum; waits for gradients of other ranks
  kCompare,  // before the update: waits until all ranks are in step()
  kUpdate,   // the local optimizer
  kGather,   // sending parameters; waits for those of other ranks
  kArrive,   // with overlap_forward: waits for parameters after step()
};
constexpr size_t kStepPhases = 6;

struct PhaseTime {
  int64_t calls = 0;
  std::chrono::nanoseconds time{0};
};

class PhaseTimes {
 public:
  PhaseTime operator[](StepPhase phase) const {
    const auto& counter = counters_[static_cast<size_t>(phase)];
    return {counter.calls, std::chrono::nanoseconds(counter.nanoseconds)};
  }
  void add(StepPhase phase, std::chrono::nanoseconds time) {
    auto& counter = counters_[static_cast<size_t>(phase)];
    counter.calls += 1;
    counter.nanoseconds += time.count();
  }
  void reset() {
    for (auto& counter : counters_) counter.calls = counter.nanoseconds = 0;
  }

 private:
  struct Counter {
    std::atomic<int64_t> calls{0}, nanoseconds{0};
  };
  std::array<Counter, kStepPhases> counters_;
};

// "shardstep::gather".
SHARDSTEP_API const char* event_name(StepPhase phase);
// "gather".
SHARDSTEP_API std::string phase_name(StepPhase phase);

// Counts a phase during its lifetime, without the phases inside it on the same thread.
class SHARDSTEP_API PhaseTimer {
 public:
  PhaseTimer(PhaseTimes& times, StepPhase phase);
  ~PhaseTimer();
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;

 private:
  PhaseTimes& times_;
  StepPhase phase_;
  PhaseTimer* outer_;
  std::chrono::nanoseconds inside_{0};  // of phases inside this one
  at::RecordFunction record_;
  std::chrono::steady_clock::time_point began_;
};

}  // namespace shardstep
