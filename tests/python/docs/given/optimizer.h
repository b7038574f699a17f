// A model, an optimizer of it and a loss that a block's statements may use.
using namespace shardstep;
struct Given {
  torch::nn::Sequential model;
  ZeroRedundancyOptimizer& optimizer;
  at::Tensor inputs, targets;
  int64_t step;
  std::vector<at::Tensor> matrices, others;
};
#define GIVEN_NAMES auto& [model, optimizer, inputs, targets, step, matrices, others] = given;
