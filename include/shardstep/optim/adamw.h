#pragma once

// AdamW on ATen's fused kernel: torch::optim::AdamW with the same options, state and results (one
// float ulp a step), in one pass over memory. Parameters that the kernel does not take (sparse,
// complex, strided in gaps, a device without one) are stepped by torch::optim::AdamW, on the same
// state. Like every torch optimizer, not safe for concurrent use. Nothing here is collective.

#include <torch/optim/adamw.h>

#include "shardstep/export.h"

namespace shardstep::optim {

class SHARDSTEP_API AdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;

  torch::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace shardstep::optim
