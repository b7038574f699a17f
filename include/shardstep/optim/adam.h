#pragma once

// torch::optim::Adam with the same options and state, stepped by ATen's fused kernel in one pass
// over memory. A step differs from torch's own by one ulp of a parameter that is large relative to
// its update. Parameters that the kernel does not support (sparse, complex, with other strides than
// their gradient, on a device without such a kernel) are stepped by torch::optim::Adam, on the same
// state. Like every torch optimizer, not safe for concurrent use. Nothing here is collective.

#include <torch/optim/adam.h>

#include "shardstep/export.h"

namespace shardstep::optim {

class SHARDSTEP_API Adam : public torch::optim::Adam {
 public:
  using torch::optim::Adam::Adam;

  torch::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace shardstep::optim
