#pragma once

// torch::optim::SGD with the same options and state, stepped by ATen's fused kernel in one pass
// over memory. A step differs from torch's own by one ulp of a parameter that is large beside its
// update. Parameters that the kernel does not take (float16, bfloat16, sparse, complex, strided
// otherwise than their gradient, on a device without one) are stepped by torch::optim::SGD, on the
// same state. Like every torch optimizer, not safe for concurrent use. Nothing here is collective.

#include <torch/optim/sgd.h>

#include "shardstep/export.h"

namespace shardstep::optim {

class SHARDSTEP_API SGD : public torch::optim::SGD {
 public:
  using torch::optim::SGD::SGD;

  torch::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace shardstep::optim
