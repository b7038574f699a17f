#pragma once
// Stand-in until ZeroRedundancyOptimizer lands.
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include "shardstep/process_group.h"
namespace shardstep {
inline ProcessGroupPtr init_process_group() {
  auto env = [](const char* n, const char* d) {
    const char* v = std::getenv(n);
    return std::string(v ? v : d);
  };
  int rank = std::stoi(env("RANK", "0")), size = std::stoi(env("WORLD_SIZE", "1"));
  c10d::TCPStoreOptions o;
  o.port = std::stoi(env("MASTER_PORT", "0"));
  o.isServer = rank == 0 && env("TORCHELASTIC_USE_AGENT_STORE", "") != "True";
  o.numWorkers = size;
  return make_process_group(c10::make_intrusive<c10d::TCPStore>(env("MASTER_ADDR", "127.0.0.1"), o),
                            rank, size);
}
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
