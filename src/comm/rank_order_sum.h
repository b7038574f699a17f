#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <vector>

namespace shardstep::detail {

struct SumOptions {
  double divisor = 1;
  // The dtype to which terms are rounded before they are summed, if theirs is another.
  std::optional<at::ScalarType> rounded_to = std::nullopt;
  bool squares = false;
};

// into = (((terms[0] + terms[1]) + terms[2]) + …) / divisor, in the dtype of `into` or, for a
// narrow one, in float32 and rounded once, in one pass over memory. `into` may be one of the terms.
// Returns the sum of the result's squares if `squares` is set, else 0. REQUIRES: contiguous tensors
// of one size, used by no other thread.
double sum_in_rank_order(const std::vector<at::Tensor>& terms, const at::Tensor& into,
                         const SumOptions& options);

}  // namespace shardstep::detail
