// What one AdamW update of one rank's parameters costs: the bare fused kernel, ours, and torch's
// own.

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "shardstep/optim/adamw.h"

namespace {

constexpr const char* kUsage =
    R"(usage: local_update [--layers N] [--width N] [--rounds N] [--threads N]

Times one AdamW step over the weights and biases of N Linear(width, width) layers (default: 10 of 2000,
40 million parameters), on one thread. The contestants take turns in every round; the table shows each
one's median and the ratios of the medians.
)";

struct Arguments {
  int64_t layers = 10;
  int64_t width = 2000;
  int64_t rounds = 11;
  int64_t threads = 1;
};

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  const std::vector<std::pair<std::string, int64_t*>> known{{"--layers", &arguments.layers},
                                                            {"--width", &arguments.width},
                                                            {"--rounds", &arguments.rounds},
                                                            {"--threads", &arguments.threads}};
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--help" || name == "-h") {
      std::fputs(kUsage, stdout);
      std::exit(0);
    }
    const auto option = std::find_if(known.begin(), known.end(),
                                     [&](const auto& entry) { return entry.first == name; });
    char* end = nullptr;
    const int64_t value = i + 1 < argc ? std::strtoll(argv[i + 1], &end, 10) : 0;
    if (option == known.end() || value < 1 || *end != '\0') {
      std::fprintf(stderr, "local_update: expected an option and a number from 1 up, got %s %s\n%s",
                   name.c_str(), i + 1 < argc ? argv[i + 1] : "", kUsage);
      std::exit(2);
    }
    *option->second = value;
    ++i;
  }
  return arguments;
}

struct Contestant {
  std::string name;
  std::function<void()> step;
  std::vector<double> milliseconds{};

  double median() {
    std::sort(milliseconds.begin(), milliseconds.end());
    return milliseconds[milliseconds.size() / 2];
  }
};

std::vector<at::Tensor> layer_parameters(const Arguments& arguments) {
  std::vector<at::Tensor> params;
  for (int64_t i = 0; i < arguments.layers; ++i) {
    params.push_back(torch::randn({arguments.width, arguments.width}));
    params.push_back(torch::randn({arguments.width}));
  }
  for (auto& param : params) param.mutable_grad() = torch::randn_like(param);
  return params;
}

// The same elements as a bucket holds them: 1-D views of one flat storage, one per parameter.
std::vector<at::Tensor> slices(const std::vector<at::Tensor>& like, const at::Tensor& flat,
                               const at::Tensor& flat_grad) {
  std::vector<at::Tensor> result;
  int64_t offset = 0;
  for (const auto& param : like) {
    result.push_back(flat.narrow(0, offset, param.numel()));
    result.back().mutable_grad() = flat_grad.narrow(0, offset, param.numel());
    offset += param.numel();
  }
  return result;
}

void time_once(Contestant& contestant) {
  const auto start = std::chrono::steady_clock::now();
  contestant.step();
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  contestant.milliseconds.push_back(took.count());
}

}  // namespace

int main(int argc, char** argv) {
  const auto arguments = parse(argc, argv);
  at::set_num_threads(static_cast<int>(arguments.threads));
  at::NoGradGuard no_grad;
  torch::manual_seed(0);

  const auto params = layer_parameters(arguments);
  int64_t count = 0;
  for (const auto& param : params) count += param.numel();
  const auto flat = torch::randn({count}), flat_grad = torch::randn({count});
  const auto exp_avg = torch::zeros({count}), exp_avg_sq = torch::zeros({count});
  auto steps = torch::zeros({});
  const torch::optim::AdamWOptions options(1e-3);

  torch::optim::AdamW plain(params, options);
  shardstep::optim::AdamW ours(params, options);
  shardstep::optim::AdamW ours_sliced(slices(params, flat, flat_grad), options);
  std::vector<Contestant> contestants{
      {"bare kernel, one flat tensor",
       [&] {
         steps += 1;
         const auto [beta1, beta2] = options.betas();
         at::_fused_adamw_({flat}, {flat_grad}, {exp_avg}, {exp_avg_sq}, {}, {steps}, options.lr(),
                           beta1, beta2, options.weight_decay(), options.eps(), false, false);
       }},
      {"shardstep::optim::AdamW, parameters", [&] { ours.step(); }},
      {"shardstep::optim::AdamW, 1-D slices", [&] { ours_sliced.step(); }},
      {"torch::optim::AdamW, parameters", [&] { plain.step(); }}};

  for (auto& contestant : contestants) contestant.step();  // makes the state and touches its pages
  for (int64_t round = 0; round < arguments.rounds; ++round) {
    for (auto& contestant : contestants) time_once(contestant);
  }

  std::printf("AdamW step, %.1f M float parameters in %zu tensors, %lld thread(s), %lld rounds\n\n",
              static_cast<double>(count) / 1e6, params.size(),
              static_cast<long long>(arguments.threads), static_cast<long long>(arguments.rounds));
  std::printf("%-38s %10s %10s %10s %12s\n", "", "median ms", "best ms", "vs bare", "torch's / it");
  const double bare = contestants.front().median(), torch_own = contestants.back().median();
  for (auto& contestant : contestants) {
    const double median = contestant.median();
    std::printf("%-38s %10.1f %10.1f %9.2fx %11.2fx\n", contestant.name.c_str(), median,
                contestant.milliseconds.front(), median / bare, torch_own / median);
  }
  std::printf(
      "\ngoals: ours at most 1.15x the bare kernel, and at least 4x faster than torch's own\n");
  return 0;
}
