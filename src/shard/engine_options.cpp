#include "shard/engine_options.h"

#include <algorithm>
#include <cmath>

#include "launch/who.h"

namespace shardstep {

std::optional<Stage2Options> stage2_options(int stage, const Stage2Options& given,
                                            const ProcessGroupPtr& group) {
  const auto where = detail::who(group);
  TORCH_CHECK_VALUE(stage == 1 || stage == 2, "shardstep: expected stage 1 or 2, got ", stage,
                    where);
  if (stage == 2) return given;
  const auto refuse_if = [&](bool is_given, const char* name) {
    TORCH_CHECK_VALUE(!is_given, "shardstep: expected stage 2 with ", name, ", got stage 1", where);
  };
  refuse_if(given.share_parameters, "share_parameters");
  refuse_if(given.overlap_forward, "overlap_forward");
  refuse_if(given.gradient_dtype.has_value(), "gradient_dtype");
  return std::nullopt;
}

double default_bucket_cap_mb(int world_size) {
  // Gradients of a bucket stay in memory until all of them are ready, so buckets are small. A rank
  // sends each owner its part of one. So that a fast link does not spend its time on latency
  // (256 KiB take 20 us at 100 Gbit/s), parts have 256 KiB, up to 1024 ranks.
  constexpr double kLeast = 25, kMost = 256, kPart = 0.25;
  return std::clamp(kPart * world_size, kLeast, kMost);
}

namespace detail {

void check_options(const EngineOptions& options, const ProcessGroupPtr& group) {
  TORCH_CHECK_VALUE(!options.master_dtype || *options.master_dtype == at::kFloat,
                    "shardstep: expected master_dtype to be float32, got ", *options.master_dtype,
                    who(group));
  TORCH_CHECK_VALUE(!options.master_dtype || options.rounding == Rounding::kNearest,
                    "shardstep: expected master_dtype or stochastic rounding, got both; masters "
                    "are never rounded, so leave one of them out",
                    who(group));
  if (!options.stage2) return;
  TORCH_CHECK_VALUE(!options.overlap,
                    "shardstep: expected stage 1 with overlap_with_ddp, got stage 2, which reduces "
                    "the gradients itself and needs no DDP",
                    who(group));
  const auto& dtype = options.stage2->gradient_dtype;
  TORCH_CHECK_VALUE(!dtype || *dtype == at::kBFloat16 || *dtype == at::kHalf || *dtype == at::kChar,
                    "shardstep: expected gradient_dtype to be bfloat16, float16 or int8, got ",
                    *dtype, who(group));
}

int64_t bucket_cap_bytes(const EngineOptions& options, int world_size, at::Device device) {
  // On a device, parameters that are not in flat storage are copied into a flat tensor to be sent.
  const bool copied = !device.is_cpu() && options.storage == BucketStorage::kInPlace;
  const bool has_cap = options.stage2 || copied;
  const double mb = options.bucket_cap_mb.value_or(has_cap ? default_bucket_cap_mb(world_size) : 0);
  TORCH_CHECK_VALUE(mb >= 0 && std::isfinite(mb),
                    "shardstep: expected bucket_cap_mb of 0 or more, got ", mb);
  return static_cast<int64_t>(std::ceil(mb * 1024 * 1024));
}

std::optional<at::ScalarType> wire_of(at::ScalarType param, const EngineOptions& options) {
  const auto& dtype = options.stage2->gradient_dtype;
  if (!dtype || !at::isFloatingType(param)) return std::nullopt;
  if (c10::elementSize(*dtype) < c10::elementSize(param)) return dtype;
  // Sums for a float32 copy are wider than the parameter. They keep its dtype: the other has
  // another range.
  const bool wide_sums = options.master_dtype || options.rounding == Rounding::kStochastic;
  return wide_sums ? std::optional(param) : std::nullopt;
}

std::string describe(const EngineOptions& options) {
  auto text = c10::str(
      "sharding by ", options.sharding == Sharding::kElement ? "element" : "parameter", ", flat ",
      options.storage == BucketStorage::kFlat, ", exchange ", static_cast<int>(options.exchange),
      ", bucket cap ", options.bucket_cap_mb ? c10::str(*options.bucket_cap_mb) : "by rule",
      ", overlap ", options.overlap, ", master_dtype ",
      options.master_dtype ? c10::toString(*options.master_dtype) : "none",
      ", stochastic rounding ", options.rounding == Rounding::kStochastic);
  if (!options.stage2) return text + ", stage 1";
  const auto& [share_parameters, overlap_forward, gradient_dtype] = *options.stage2;
  return c10::str(text, ", stage 2, shared parameters ", share_parameters, ", overlap_forward ",
                  overlap_forward, ", gradient_dtype ",
                  gradient_dtype ? c10::toString(*gradient_dtype) : "none");
}

}  // namespace detail
}  // namespace shardstep
