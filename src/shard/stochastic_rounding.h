#pragma once

// Stochastic rounding of float32 values to bfloat16: up or down at random, so that the average of
// many roundings is the value itself. The random bits of an element depend on nothing but a seed,
// its parameter and its place there: how parameters are divided among ranks does not matter.
// Thread safety: draw_rounding_seed locks torch's generator, the rest has no state. Nothing here
// communicates.

#include <ATen/ATen.h>

#include <cstdint>

#include "shardstep/export.h"

namespace shardstep {

// From torch's default generator of the CPU, which checkpoints save.
SHARDSTEP_API uint64_t draw_rounding_seed();

struct RoundingNoise {
  uint64_t seed = 0;
  int64_t param = 0;  // its index
  int64_t first = 0;  // the place of the first element, in memory order
};

// Rounds `wide` into `narrow`. Values that bfloat16 has, infinities and NaN stay what they are.
// REQUIRES: dense tensors of one size and memory order, float32 and bfloat16.
SHARDSTEP_API void round_stochastically(const at::Tensor& wide, const at::Tensor& narrow,
                                        const RoundingNoise& noise);

// The same by ATen's operations, for any device.
SHARDSTEP_API void round_stochastically_by_ops(const at::Tensor& wide, const at::Tensor& narrow,
                                               const RoundingNoise& noise);

// The float32 values of a bfloat16 parameter during an update. Between updates the tensor has its
// sizes but no memory, and reading it throws.
class SHARDSTEP_API TemporaryCopy {
 public:
  // `own` is what this rank owns of a parameter, in its memory.
  explicit TemporaryCopy(const at::Tensor& own);

  // The same object for the local optimizer's whole life.
  const at::Tensor& tensor() const { return tensor_; }
  bool has_memory() const { return has_memory_; }
  // Takes memory, and the values of `own`.
  void widen(const at::Tensor& own);
  // Rounds into `own` and gives the memory back.
  void round_into(const at::Tensor& own, const RoundingNoise& noise);

 private:
  at::Tensor nothing_;  // what the tensor is between updates
  at::Tensor tensor_;
  bool has_memory_ = false;
};

}  // namespace shardstep
