#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <vector>

namespace shardstep::detail {

struct SumOptions {
  double divisor = 1;
  // What terms are rounded to before they are added up, if they are of another dtype.
  std::optional<at::ScalarType> rounded_to = std::nullopt;
  bool squares = false;
};

// into = (((terms[0] + terms[1]) + terms[2]) + …) / divisor, in the dtype of `into`, in one pass
// over memory. `into` may be one of the terms. Returns the sum of the result's squares if that was
// asked for, else 0. REQUIRES: contiguous tensors of one size; not more than one thread works on
// them.
double sum_in_rank_order(const std::vector<at::Tensor>& terms, const at::Tensor& into,
                         const SumOptions& options);

}  // namespace shardstep::detail
