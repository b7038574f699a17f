#pragma once

// torch::optim::Adagrad with the same options and state, stepped by ATen's fused kernel in one pass
// over memory. A step differs from torch's own by one ulp of a parameter that is large relative to
// its update. Parameters that the kernel does not support (sparse, complex, with other strides than
// their gradient, on a device without such a kernel) are stepped by torch::optim::Adagrad, on the
// same state. Parameters of groups that are added later get their accumulator in the next step(),
// from the defaults. Like every torch optimizer, not safe for concurrent use. Nothing here is
// collective.

#include <torch/optim/adagrad.h>

#include "shardstep/export.h"

namespace shardstep::optim {

class SHARDSTEP_API Adagrad : public torch::optim::Adagrad {
 public:
  using torch::optim::Adagrad::Adagrad;

  torch::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace shardstep::optim
