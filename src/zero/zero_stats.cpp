// ZeroRedundancyOptimizer::stats().

#include "shard/shard_engine.h"
#include "shardstep/zero_redundancy_optimizer.h"

namespace shardstep {
OptimizerStats ZeroRedundancyOptimizer::stats() const {
  OptimizerStats stats;
  for (size_t p = 0; p < kStepPhases; ++p) {
    const auto phase = static_cast<StepPhase>(p);
    const auto [calls, time] = engine_->phase_times()[phase];
    stats.phases[phase_name(phase)] = {calls, std::chrono::duration<double>(time).count()};
  }
  stats.exchange = engine_->exchange_name();
  const auto traffic = engine_->traffic();
  stats.bytes_sent = traffic.bytes_sent - sent_before_;
  stats.bytes_received = traffic.bytes_received - received_before_;
  stats.bytes_shared = traffic.bytes_shared - shared_before_;
  stats.buckets = static_cast<int64_t>(engine_->buckets().size());
  for (const auto& bucket : engine_->buckets()) {
    if (bucket.flat().defined()) {
      stats.flat_parameter_bytes += static_cast<int64_t>(bucket.flat().nbytes());
    }
  }
  stats.gradient_bytes = engine_->gradient_bytes();
  stats.state_bytes = local_state_bytes();
  return stats;
}

void ZeroRedundancyOptimizer::reset_stats() {
  engine_->phase_times().reset();
  const auto traffic = engine_->traffic();
  sent_before_ = traffic.bytes_sent;
  received_before_ = traffic.bytes_received;
  shared_before_ = traffic.bytes_shared;
}

}  // namespace shardstep
