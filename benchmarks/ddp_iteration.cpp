// What one training iteration costs with our DistributedDataParallel: alone, followed by step(),
// and with the update inside the backward pass. Started on every rank by benchmarks/ddp.py.

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
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

double over_ranks(const ProcessGroupPtr& group, double value, c10d::ReduceOp op) {
  std::vector<at::Tensor> all{torch::full({1}, value, at::kDouble)};
  c10d::AllreduceOptions options;
  options.reduceOp = std::move(op);
  group->allreduce(all, options)->wait();
  return all[0].item<double>();
}

// The processor time of all threads of this process, in milliseconds.
double processor_time() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
}

// Prints "name milliseconds processor-milliseconds": the median over the iterations of the slowest
// rank's time, and what an iteration costs the processors, all ranks together.
void time_iterations(const std::string& name, const ProcessGroupPtr& group, int64_t iterations,
                     const std::function<void()>& iteration) {
  for (int i = 0; i < 3; ++i) iteration();  // buckets are rebuilt and state is created
  std::vector<double> times;
  double processors = 0;
  for (int64_t i = 0; i < iterations; ++i) {
    group->barrier()->wait();
    const auto begin = std::chrono::steady_clock::now();
    const double processors_before = processor_time();
    iteration();
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
    processors += processor_time() - processors_before;
    times.push_back(over_ranks(group, time.count(), c10d::ReduceOp::MAX));
  }
  processors = over_ranks(group, processors, c10d::ReduceOp::SUM) / iterations;
  std::sort(times.begin(), times.end());
  if (group->getRank() == 0) {
    std::printf("%s\t%.2f\t%.2f\n", name.c_str(), times[times.size() / 2], processors);
    std::fflush(stdout);
  }
}

using Ddp = DistributedDataParallel<torch::nn::Sequential>;
using HookMaker = CommHook (*)(CommHook, DistributedDataParallelBase&, ZeroRedundancyOptimizer&,
                               bool);

// How gradients and parameters are sent.
enum class Way {
  kAllReduce,  // gradients to every rank, as DDP does by itself
  kToOwners,   // gradients to their owners
  kShared,     // the same, in shared memory
};

class Benchmark {
 public:
  Benchmark(int64_t layers, int64_t iterations, std::string rows)
      : layers_(layers), iterations_(iterations), rows_(std::move(rows)) {}

  void run() {
    plain();
    for (const auto sharding : {Sharding::kParameter, Sharding::kElement}) {
      for (const auto way : {Way::kAllReduce, Way::kToOwners, Way::kShared}) {
        step(sharding, way);
        overlapped("hook_with_zero_step", hook_with_zero_step, sharding, way);
        overlapped("interleaved", hook_with_zero_step_interleaved, sharding, way);
      }
    }
  }

 private:
  bool wanted(const std::string& name) const { return name.find(rows_) != std::string::npos; }
  Ddp make_ddp() const {
    return Ddp(
        make_model(layers_),
        DistributedDataParallelOptions().process_group(group_).gradient_as_bucket_view(true));
  }
  static std::string name_of(const std::string& what, Sharding sharding, Way way) {
    return "C++ DDP, " + what +
           (sharding == Sharding::kParameter ? " by parameter" : " by element") +
           (way == Way::kAllReduce ? "" : ", to owners") +
           (way == Way::kShared ? ", shared memory" : "");
  }
  ZeroOptions zero_options(Sharding sharding, Way way) const {
    return ZeroOptions().process_group(group_).sharding(sharding).exchange(
        way == Way::kShared ? ExchangeKind::kSharedMemory : ExchangeKind::kAuto);
  }
  void forward_backward(Ddp& ddp) const {
    ddp.zero_grad();
    ddp(input_).square().mean().backward();
  }

  void plain() {
    if (const std::string name = "C++ DDP alone"; wanted(name)) {
      auto ddp = make_ddp();
      time_iterations(name, group_, iterations_, [&] { forward_backward(ddp); });
    }
    if (const std::string name = "C++ DDP, fused Adam"; wanted(name)) {
      auto ddp = make_ddp();
      optim::Adam adam(ddp.parameters(), options_);
      time_iterations(name, group_, iterations_, [&] {
        forward_backward(ddp);
        adam.step();
      });
    }
  }

  void step(Sharding sharding, Way way) {
    const auto name = name_of("ZeRO step()", sharding, way);
    if (!wanted(name)) return;
    auto ddp = make_ddp();
    ZeroRedundancyOptimizer zero(ddp.parameters(), options_, zero_options(sharding, way));
    if (way != Way::kAllReduce) ddp.register_comm_hook(reduce_to_owners_hook(ddp, zero));
    time_iterations(name, group_, iterations_, [&] {
      forward_backward(ddp);
      zero.step();
    });
  }

  void overlapped(const std::string& what, HookMaker hook, Sharding sharding, Way way) {
    const auto name = name_of(what, sharding, way);
    if (!wanted(name)) return;
    auto ddp = make_ddp();
    // A bucket per parameter, so that every rank has a part of every update.
    ZeroRedundancyOptimizer zero(
        ddp.parameters(), options_,
        zero_options(sharding, way).overlap_with_ddp(true).bucket_cap_mb(1e-6));
    ddp.register_comm_hook(
        hook(way == Way::kAllReduce ? allreduce_hook(group_) : reduce_to_owners_hook(ddp, zero),
             ddp, zero, false));
    time_iterations(name, group_, iterations_, [&] {
      forward_backward(ddp);
      zero.wait();
    });
  }

  int64_t layers_;
  int64_t iterations_;
  std::string rows_;
  ProcessGroupPtr group_ = init_process_group();
  at::Tensor input_ = torch::randn({kBatch, kWidth});
  torch::optim::AdamOptions options_{1e-4};
};

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  if (argc != 3 && argc != 4) {
    std::fprintf(stderr,
                 "usage: ddp_iteration LAYERS ITERATIONS [ROWS], on every rank; see ddp.py\n");
    return 2;
  }
  Benchmark(std::atoll(argv[1]), std::atoll(argv[2]), argc == 4 ? argv[3] : "").run();
  return 0;
}
