#pragma once

// What a ShardEngine is asked to do. Nothing here communicates.

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <string>

#include "shard/bucket.h"
#include "shardstep/export.h"
#include "shardstep/process_group.h"
#include "shardstep/sharding.h"

namespace shardstep {

// Stage 2: the engine averages gradients over the ranks, and each rank keeps what it owns.
struct Stage2Options {
  // One copy of the parameters for all ranks, which share memory. No rank may change them by
  // itself.
  bool share_parameters = false;
  // after_step returns at once, and parameters are there when wait() returns.
  bool overlap_forward = false;
  // What wider gradients are rounded to, to travel; they are added up in their own dtype.
  std::optional<at::ScalarType> gradient_dtype = std::nullopt;
};

struct EngineOptions {
  // Unset: stage 1, where gradients arrive whole.
  std::optional<Stage2Options> stage2 = std::nullopt;
  Sharding sharding = Sharding::kParameter;
  BucketStorage storage = BucketStorage::kInPlace;
  ExchangeKind exchange = ExchangeKind::kAuto;
  // 0: one bucket per dtype and device. Unset: that in stage 1, small ones in stage 2.
  std::optional<double> bucket_cap_mb = std::nullopt;
  // The update runs inside the backward pass, some parameters at a time.
  bool overlap = false;
};

// The options for a `stage` that a user asked for. Throws ValueError if there is no such stage, or
// if options of stage 2 are given without it.
SHARDSTEP_API std::optional<Stage2Options> stage2_options(int stage, const Stage2Options& given,
                                                          const ProcessGroupPtr& group);

namespace detail {

// Throws ValueError if options contradict each other.
void check_options(const EngineOptions& options, const ProcessGroupPtr& group);
// The most bytes that a bucket holds; 0 for no limit.
int64_t bucket_cap_bytes(const EngineOptions& options);
// In words, for ranks to compare.
std::string describe(const EngineOptions& options);

}  // namespace detail
}  // namespace shardstep
