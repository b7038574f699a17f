#include <shardstep/shardstep.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <cstdio>

int main() {
  auto group = shardstep::init_process_group();
  auto model = torch::nn::Linear(3, 1);
  shardstep::ZeroRedundancyOptimizer optimizer(model->parameters(),
                                               torch::optim::AdamWOptions(1e-2));
  double first = 0, last = 0;
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    auto loss = (model->forward(torch::ones({4, 3})) - 2).square().mean();
    loss.backward();
    optimizer.step();
    (step == 0 ? first : last) = loss.item<double>();
  }
  std::printf("shardstep %s, %d rank(s), loss %g -> %g\n", shardstep::version(), group->getSize(),
              first, last);
  return last < first ? 0 : 1;
}
