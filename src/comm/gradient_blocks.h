#pragma once

// Gradients in 8 bits, for ReductionOptions::wire = kChar: blocks of elements with one float32
// scale each. An element is the nearest of the multiples -127 … 127 of its block's scale, which is
// the block's largest magnitude / 127; so it is off by at most half a scale. A block with an
// element that is not finite becomes NaN. A tensor's blocks start at its first element; the last
// may be short.
//
// A message holds the scales of all blocks of all its tensors, then one byte per element. On the
// CPU and on a device it has the same bits. Thread-safe.

#include <ATen/ATen.h>

#include <optional>
#include <vector>

#include "comm/rank_order_sum.h"

namespace shardstep::detail {

constexpr int64_t kBlockElements = 256;

inline bool is_in_blocks(std::optional<at::ScalarType> wire) { return wire == at::kChar; }

// The size of a message for tensors of these sizes.
int64_t bytes_in_blocks(const std::vector<at::Tensor>& tensors);

// The message. REQUIRES: contiguous 1-D floating-point tensors of one device.
at::Tensor to_blocks(const std::vector<at::Tensor>& tensors);

// What the message says, in float32 tensors of the same sizes.
void from_blocks(const at::Tensor& message, const std::vector<at::Tensor>& into);

// Elements of a CPU tensor from `begin` on as from_blocks(to_blocks()) gives them, as many as fit
// into `into`, which is float32.
void through_blocks(const at::Tensor& tensor, int64_t begin, const at::Tensor& into);

// As sum_in_rank_order, over messages with one tensor for each of `into`. Returns the squares.
double sum_blocks_in_rank_order(const std::vector<at::Tensor>& messages,
                                const std::vector<at::Tensor>& into, const SumOptions& options);

}  // namespace shardstep::detail
