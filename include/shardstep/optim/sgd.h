#pragma once

// SGD on ATen's fused kernel: torch::optim::SGD with the same options, state and results (one float
// ulp a step), in one pass over memory. Parameters that the kernel does not take (sparse, complex,
// strided in gaps, a device without one) are stepped by torch::optim::SGD, on the same state. Like
// every torch optimizer, not safe for concurrent use. Nothing here is collective.

#include <torch/optim/sgd.h>

#include "shardstep/export.h"

namespace shardstep::optim {

class SHARDSTEP_API SGD : public torch::optim::SGD {
 public:
  using torch::optim::SGD::SGD;

  torch::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace shardstep::optim
