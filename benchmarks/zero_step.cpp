// What one step() of stage 1 costs on several ranks of this machine, each way it can be divided and
// moved, next to a replicated optimizer, which sends nothing and keeps everything.

#include <ATen/Parallel.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "shard/shard_engine.h"
#include "shardstep/optim/adamw.h"
#include "shardstep/shardstep.h"

namespace {

using shardstep::ExchangeKind;
using shardstep::Sharding;
using torch::optim::AdamWOptions;

constexpr const char* kUsage =
    R"(usage: zero_step [--ranks A,B,...] [--layers N] [--width N] [--rounds N]

Times AdamW's step() over the weights and biases of N Linear(width, width) layers (default: 20 of 2000,
80 million parameters) on A, then B, ... ranks (default: 2,4), which are processes on Gloo with one
thread each. The ways take turns in every round (default: 3 rounds of 3 steps). The table shows medians
over the rounds of the slowest rank's time, their ratio to the first way, bytes sent by a rank in a step
(counted, or computed for native), and how even the shards are.
)";

struct Arguments {
  std::vector<int> ranks{2, 4};
  int64_t layers = 20;
  int64_t width = 2000;
  int64_t rounds = 3;
};

[[noreturn]] void refuse(const std::string& what) {
  std::fprintf(stderr, "zero_step: %s\n%s", what.c_str(), kUsage);
  std::exit(2);
}

int64_t number(const std::string& text) {
  char* end = nullptr;
  const int64_t value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || value < 1) {
    refuse("expected a number from 1 up, got '" + text + "'");
  }
  return value;
}

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--help" || name == "-h") {
      std::fputs(kUsage, stdout);
      std::exit(0);
    }
    if (i + 1 == argc) refuse("expected a value for " + name);
    const std::string value = argv[i + 1];
    if (name == "--ranks") {
      arguments.ranks.clear();
      for (size_t begin = 0; begin <= value.size();) {
        const size_t comma = std::min(value.find(',', begin), value.size());
        arguments.ranks.push_back(static_cast<int>(number(value.substr(begin, comma - begin))));
        begin = comma + 1;
      }
    } else if (name == "--layers") {
      arguments.layers = number(value);
    } else if (name == "--width") {
      arguments.width = number(value);
    } else if (name == "--rounds") {
      arguments.rounds = number(value);
    } else {
      refuse("unknown option " + name);
    }
  }
  return arguments;
}

struct Way {
  std::string name;
  Sharding sharding;
  bool view;
  ExchangeKind exchange;
};

const std::vector<Way> kWays{
    {"by parameter, in place", Sharding::kParameter, false, ExchangeKind::kPairwise},
    {"by parameter, bucket view", Sharding::kParameter, true, ExchangeKind::kPairwise},
    {"by element, in place", Sharding::kElement, false, ExchangeKind::kPairwise},
    {"by element, bucket view", Sharding::kElement, true, ExchangeKind::kPairwise},
    {"by parameter, view, native", Sharding::kParameter, true, ExchangeKind::kNative},
    {"by element, view, native", Sharding::kElement, true, ExchangeKind::kNative},
};

struct Row {
  std::vector<double> milliseconds;
  double sent_mb = 0;
  double state_mb = 0;
  double largest = 1;
  double smallest = 1;

  double median() {
    std::sort(milliseconds.begin(), milliseconds.end());
    return milliseconds[milliseconds.size() / 2];
  }
};

std::vector<at::Tensor> make_params(const Arguments& arguments) {
  std::vector<at::Tensor> params;
  for (int64_t i = 0; i < arguments.layers; ++i) {
    params.push_back(torch::randn({arguments.width, arguments.width}).requires_grad_());
    params.push_back(torch::randn({arguments.width}).requires_grad_());
  }
  for (auto& param : params) param.mutable_grad() = torch::full_like(param, 1e-3).detach();
  return params;
}

double slowest(const shardstep::ProcessGroupPtr& group, double value) {
  std::vector<at::Tensor> all{torch::full({1}, value, at::kDouble)};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  group->allreduce(all, options)->wait();
  return all[0].item<double>();
}

constexpr int kSteps = 3;

void time_steps(torch::optim::Optimizer& optimizer, const shardstep::ProcessGroupPtr& group,
                Row& row) {
  optimizer.step();  // makes the state
  for (int step = 0; step < kSteps; ++step) {
    group->barrier()->wait();
    const auto begin = std::chrono::steady_clock::now();
    optimizer.step();
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
    row.milliseconds.push_back(slowest(group, time.count()));
  }
}

void time_way(const Way& way, std::vector<at::Tensor>& params,
              const shardstep::ProcessGroupPtr& group, Row& row) {
  shardstep::ZeroRedundancyOptimizer zero(params, AdamWOptions(1e-3),
                                          shardstep::ZeroOptions()
                                              .process_group(group)
                                              .sharding(way.sharding)
                                              .parameters_as_bucket_view(way.view)
                                              .exchange(way.exchange));
  time_steps(zero, group, row);
  row.sent_mb = static_cast<double>(zero.engine().traffic().bytes_sent) / (kSteps + 1) / 1e6;
  row.state_mb = static_cast<double>(zero.local_state_bytes()) / 1e6;
  const auto& partition = zero.engine().partition();
  std::vector<double> owned;
  for (int rank = 0; rank < group->getSize(); ++rank) {
    owned.push_back(static_cast<double>(partition.owned_elements(rank)));
  }
  row.largest = *std::max_element(owned.begin(), owned.end());
  row.smallest = *std::min_element(owned.begin(), owned.end());
}

void run_rank(const Arguments& arguments, int rank, int world_size, const std::string& path) {
  at::set_num_threads(1);
  auto store = c10::make_intrusive<c10d::FileStore>(path, world_size);
  auto group = shardstep::make_process_group(
      store, rank, world_size,
      shardstep::ProcessGroupOptions().backend("gloo").timeout(std::chrono::minutes(5)));
  auto params = make_params(arguments);
  int64_t elements = 0;
  for (const auto& param : params) elements += param.numel();

  Row replicated;
  std::vector<Row> rows(kWays.size());
  for (int64_t round = 0; round < arguments.rounds; ++round) {
    if (rank == 0) {
      std::fprintf(stderr, "%d ranks: round %ld of %ld\n", world_size, round + 1, arguments.rounds);
    }
    {
      shardstep::optim::AdamW plain(params, AdamWOptions(1e-3));
      time_steps(plain, group, replicated);
    }
    for (size_t i = 0; i < kWays.size(); ++i) time_way(kWays[i], params, group, rows[i]);
  }
  group->barrier()->wait();
  if (rank != 0) return;

  std::printf("\n%d ranks, %.1f M parameters (%.0f MB), AdamW, one thread per rank\n", world_size,
              elements / 1e6, elements * 4 / 1e6);
  std::printf("%-28s %9s %7s %12s %14s %10s\n", "step()", "median ms", "ratio", "MB sent/rank",
              "state MB/rank", "max/min");
  std::printf("%-28s %9.1f %7s %12.1f %14.1f %10s\n", "replicated, no exchange",
              replicated.median(), "", 0.0, elements * 8 / 1e6, "");
  const double first = rows[0].median();
  for (size_t i = 0; i < kWays.size(); ++i) {
    auto& row = rows[i];
    std::printf("%-28s %9.1f %7.2f %12.1f %14.1f %10.4f\n", kWays[i].name.c_str(), row.median(),
                row.median() / first, row.sent_mb, row.state_mb, row.largest / row.smallest);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto arguments = parse(argc, argv);
  for (int world_size : arguments.ranks) {
    const auto path =
        (std::filesystem::temp_directory_path() /
         ("shardstep_zero_step_" + std::to_string(getpid()) + "_" + std::to_string(world_size)))
            .string();
    std::filesystem::remove(path);
    std::vector<pid_t> children;
    for (int rank = 0; rank < world_size; ++rank) {
      // Before torch starts threads, so a fork is safe.
      const pid_t child = fork();
      if (child == 0) {
        int code = 0;
        try {
          run_rank(arguments, rank, world_size, path);
        } catch (const std::exception& error) {
          std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
          code = 1;
        }
        std::fflush(nullptr);
        std::_Exit(code);
      }
      children.push_back(child);
    }
    bool failed = false;
    for (pid_t child : children) {
      int status = 0;
      waitpid(child, &status, 0);
      failed = failed || status != 0;
    }
    std::filesystem::remove(path);
    if (failed) return 1;
  }
  return 0;
}
