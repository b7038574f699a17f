#pragma once
// Stand-in until ZeroRedundancyOptimizer lands.
#include <torch/torch.h>
#include "shardstep/process_group.h"
namespace shardstep {
enum class Sharding { kParameter, kElement };
struct ZeroOptions {
  TORCH_ARG(ProcessGroupPtr, process_group);
  TORCH_ARG(Sharding, sharding) = Sharding::kParameter;
};
using LocalOptimizer = torch::optim::AdamWOptions;
template <class T>
LocalOptimizer local_optimizer(const T& o) {
  return LocalOptimizer(o.lr());
}
struct ZeroRedundancyOptimizer : torch::optim::AdamW {
  ZeroRedundancyOptimizer(std::vector<at::Tensor> p, LocalOptimizer l, ZeroOptions)
      : torch::optim::AdamW(p, l) {}
  int64_t local_state_bytes() { return 0; }
};
}  // namespace shardstep
