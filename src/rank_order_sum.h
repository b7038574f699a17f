#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace shardstep::detail {

// into = (((terms[0] + terms[1]) + terms[2]) + …) / divisor, in the dtype of `into`, in one pass
// over memory. `into` may be one of the terms. REQUIRES: contiguous tensors of one size; not more
// than one thread works on them.
void sum_in_rank_order(const std::vector<at::Tensor>& terms, const at::Tensor& into,
                       double divisor);

}  // namespace shardstep::detail
