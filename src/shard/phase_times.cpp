#include "shard/phase_times.h"

#include <utility>

namespace shardstep {
namespace {

constexpr std::array<const char*, kStepPhases> kEventNames{
    "shardstep::post",   "shardstep::reduce", "shardstep::compare",
    "shardstep::update", "shardstep::gather", "shardstep::arrive"};

thread_local PhaseTimer* innermost_timer = nullptr;

}  // namespace

const char* event_name(StepPhase phase) { return kEventNames[static_cast<size_t>(phase)]; }

std::string phase_name(StepPhase phase) {
  const std::string event = event_name(phase);
  return event.substr(event.rfind(':') + 1);
}

PhaseTimer::PhaseTimer(PhaseTimes& times, StepPhase phase)
    : times_(times),
      phase_(phase),
      outer_(std::exchange(innermost_timer, this)),
      record_(at::RecordScope::FUNCTION),
      began_(std::chrono::steady_clock::now()) {
  if (record_.isActive()) record_.before(event_name(phase));
}

PhaseTimer::~PhaseTimer() {
  const std::chrono::nanoseconds elapsed = std::chrono::steady_clock::now() - began_;
  times_.add(phase_, elapsed - inside_);
  innermost_timer = outer_;
  if (outer_ != nullptr) outer_->inside_ += elapsed;
}

}  // namespace shardstep
