// What one training iteration costs with our DistributedDataParallel: alone, followed by step(),
// and with the update inside the backward pass. Started on every rank by benchmarks/ddp.py.

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "shardstep/shardstep.h"

namespace {

using namespace shardstep;

constexpr int64_t kWidth = 2000;
constexpr int64_t kBatch = 20;

torch::nn::Sequential make_model(int64_t layers) {
  torch::manual_seed(0);
  torch::nn::Sequential model;
  for (int64_t i = 0; i < layers; ++i) model->push_back(torch::nn::Linear(kWidth, kWidth));
  return model;
}

double slowest(const ProcessGroupPtr& group, double value) {
  std::vector<at::Tensor> all{torch::full({1}, value, at::kDouble)};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  group->allreduce(all, options)->wait();
  return all[0].item<double>();
}

// Prints "name milliseconds": the median over the iterations of the slowest rank's time.
void time_iterations(const std::string& name, const ProcessGroupPtr& group, int64_t iterations,
                     const std::function<void()>& iteration) {
  for (int i = 0; i < 3; ++i) iteration();  // buckets are rebuilt and state is made
  std::vector<double> times;
  for (int64_t i = 0; i < iterations; ++i) {
    group->barrier()->wait();
    const auto begin = std::chrono::steady_clock::now();
    iteration();
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
    times.push_back(slowest(group, time.count()));
  }
  std::sort(times.begin(), times.end());
  if (group->getRank() == 0) {
    std::printf("%s\t%.2f\n", name.c_str(), times[times.size() / 2]);
    std::fflush(stdout);
  }
}

using HookMaker = CommHook (*)(CommHook, DistributedDataParallelBase&, ZeroRedundancyOptimizer&,
                               bool);

void run(int64_t layers, int64_t iterations) {
  auto group = init_process_group();
  const auto input = torch::randn({kBatch, kWidth});
  const auto options = torch::optim::AdamOptions(1e-4);
  const auto ddp_options =
      DistributedDataParallelOptions().process_group(group).gradient_as_bucket_view(true);
  const auto forward_backward = [&](auto& ddp) {
    ddp.zero_grad();
    ddp(input).square().mean().backward();
  };
  {
    DistributedDataParallel<torch::nn::Sequential> ddp(make_model(layers), ddp_options);
    time_iterations("C++ DDP alone", group, iterations, [&] { forward_backward(ddp); });
  }
  {
    DistributedDataParallel<torch::nn::Sequential> ddp(make_model(layers), ddp_options);
    optim::Adam adam(ddp.parameters(), options);
    time_iterations("C++ DDP, fused Adam", group, iterations, [&] {
      forward_backward(ddp);
      adam.step();
    });
  }
  for (const auto sharding : {Sharding::kParameter, Sharding::kElement}) {
    const std::string by = sharding == Sharding::kParameter ? "by parameter" : "by element";
    const auto zero_options = ZeroOptions().process_group(group).sharding(sharding);
    {
      DistributedDataParallel<torch::nn::Sequential> ddp(make_model(layers), ddp_options);
      ZeroRedundancyOptimizer zero(ddp.parameters(), options, zero_options);
      time_iterations("C++ DDP, ZeRO step() " + by, group, iterations, [&] {
        forward_backward(ddp);
        zero.step();
      });
    }
    for (const auto& [name, hook] : std::vector<std::pair<std::string, HookMaker>>{
             {"hook_with_zero_step ", hook_with_zero_step},
             {"interleaved ", hook_with_zero_step_interleaved}}) {
      DistributedDataParallel<torch::nn::Sequential> ddp(make_model(layers), ddp_options);
      // A bucket a parameter, so that every rank has a part of every update.
      auto overlapped = zero_options;
      ZeroRedundancyOptimizer zero(ddp.parameters(), options,
                                   overlapped.overlap_with_ddp(true).bucket_cap_mb(1e-6));
      ddp.register_comm_hook(hook(allreduce_hook(group), ddp, zero, false));
      time_iterations("C++ DDP, " + name + by, group, iterations, [&] {
        forward_backward(ddp);
        zero.wait();
      });
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  if (argc != 3) {
    std::fprintf(stderr, "usage: ddp_iteration LAYERS ITERATIONS, on every rank; see ddp.py\n");
    return 2;
  }
  run(std::atoll(argv[1]), std::atoll(argv[2]));
  return 0;
}
