#pragma once

// Adagrad on ATen's fused kernel: torch::optim::Adagrad with the same options, state and results
// (one float ulp a step), in one pass over memory. Parameters that the kernel does not take
// (sparse, complex, strided in gaps, a device without one) are stepped by torch::optim::Adagrad, on
// the same state. Like every torch optimizer, not safe for concurrent use. Nothing here is
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
