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
  // One copy of the parameters for all ranks of a host, which share memory. No rank may change
  // them by itself.
  bool share_parameters = false;
  // after_step returns at once, and parameters have arrived when wait() returns.
  bool overlap_forward = false;
  // The dtype in which wider gradients are sent; they are summed in their own, or in the master's.
  // Int8: in blocks with a scale each.
  std::optional<at::ScalarType> gradient_dtype = std::nullopt;
};

struct EngineOptions {
  // Unset: stage 1, where gradients arrive whole.
  std::optional<Stage2Options> stage2 = std::nullopt;
  Sharding sharding = Sharding::kParameter;
  BucketStorage storage = BucketStorage::kInPlace;
  ExchangeKind exchange = ExchangeKind::kAuto;
  // 0: one bucket per dtype and device. Unset: that in stage 1 with CPU tensors or flat storage,
  // small ones otherwise.
  std::optional<double> bucket_cap_mb = std::nullopt;
  // The update runs inside the backward pass, some parameters at a time.
  bool overlap = false;
  // Float32: the local optimizer updates masters of this dtype in place of bfloat16 and float16
  // parameters, which get the rounded result.
  std::optional<at::ScalarType> master_dtype = std::nullopt;
  // Stochastic: the local optimizer updates float32 copies of bfloat16 parameters, which exist
  // during the update, and gradients are summed in float32.
  Rounding rounding = Rounding::kNearest;
};

// The options for a `stage` that a user asked for. Throws ValueError if there is no such stage, or
// if options of stage 2 are given without it.
SHARDSTEP_API std::optional<Stage2Options> stage2_options(int stage, const Stage2Options& given,
                                                          const ProcessGroupPtr& group);

// bucket_cap_mb of stage 2, where none is given.
SHARDSTEP_API double default_bucket_cap_mb(int world_size);

namespace detail {

// Throws ValueError if options contradict each other.
void check_options(const EngineOptions& options, const ProcessGroupPtr& group);
// The most bytes that a bucket of parameters on `device` holds; 0 for no limit.
int64_t bucket_cap_bytes(const EngineOptions& options, int world_size,
                         at::Device device = at::kCPU);
// What gradients of parameters of this dtype are rounded to when they are sent, if anything.
std::optional<at::ScalarType> wire_of(at::ScalarType param, const EngineOptions& options);
// As text, for ranks to compare.
std::string describe(const EngineOptions& options);

}  // namespace detail
}  // namespace shardstep
