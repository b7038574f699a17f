#pragma once

// A model, inputs and a single process's result for the tests of DistributedDataParallel and Join.

#include <functional>
#include <vector>

#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep::test {

// The same numbers in every process, whatever else draws from torch's generator.
inline void fill(torch::nn::Module& module, uint64_t seed) {
  torch::NoGradGuard no_grad;
  const auto random = generator(seed);
  for (auto& param : module.parameters()) {
    param.copy_(torch::randn(param.sizes(), random).div_(2));
  }
}

struct NetImpl : torch::nn::Module {
  explicit NetImpl(uint64_t seed = 1)
      : first(register_module("first", Linear(6, 8))),
        second(register_module("second", Linear(8, 8))),
        last(register_module("last", Linear(8, 3))) {
    fill(*this, seed);
  }
  at::Tensor forward(const at::Tensor& input) {
    return last(torch::tanh(second(torch::tanh(first(input)))));
  }
  Linear first, second, last;
};
TORCH_MODULE(Net);

inline at::Tensor input_of(int rank, int step, int64_t rows = 4) {
  return randn({rows, 6}, generator(1000 + 10 * step + rank));
}

inline at::Tensor loss_of(const at::Tensor& output) { return output.square().mean(); }

inline std::vector<at::Tensor> clones(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const auto& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

inline std::unique_ptr<torch::optim::Optimizer> make_adam(std::vector<at::Tensor> params) {
  return std::make_unique<optim::Adam>(std::move(params), torch::optim::AdamOptions(0.01));
}

// What one process gets that computes the gradient of each rank's input in turn and averages: the
// gradients of ranks whose inputs have run out are zero. `divide_by_active` averages over the rest.
inline std::vector<at::Tensor> reference(const std::vector<int>& inputs,
                                         const MakeOptimizer& make = make_adam,
                                         bool divide_by_active = false, double max_norm = 0) {
  Net net;
  auto params = net->parameters();
  auto optimizer = make(params);
  const int world = static_cast<int>(inputs.size());
  for (int step = 0; step < *std::max_element(inputs.begin(), inputs.end()); ++step) {
    const auto active =
        std::count_if(inputs.begin(), inputs.end(), [&](int count) { return step < count; });
    std::vector<at::Tensor> sums(params.size());
    for (int rank = 0; rank < world; ++rank) {
      if (step >= inputs[rank]) continue;
      const auto gradients = torch::autograd::grad({loss_of(net(input_of(rank, step)))}, params);
      for (size_t i = 0; i < params.size(); ++i) {
        const auto part =
            gradients[i] * (1.0 / static_cast<double>(divide_by_active ? active : world));
        sums[i] = sums[i].defined() ? sums[i] + part : part;
      }
    }
    for (size_t i = 0; i < params.size(); ++i) params[i].mutable_grad() = sums[i];
    if (max_norm > 0) torch::nn::utils::clip_grad_norm_(params, max_norm);
    optimizer->step();
  }
  return clones(params);
}

// Two ranks add the same two numbers as one process; more may add them in another order.
inline void expect_parity(const std::vector<at::Tensor>& got,
                          const std::vector<at::Tensor>& expected, int world,
                          const std::string& what = "", double tolerance = 1e-5) {
  if (world <= 2) return expect_equal(got, expected, what);
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(near(got[i], expected[i], tolerance, tolerance))
        << what << " parameter " << i << " differs by "
        << (got[i].cpu() - expected[i].cpu()).abs().max().item<double>();
  }
}

// Collects the warnings of this thread while it lives.
class Warnings : public c10::WarningHandler {
 public:
  Warnings() : guard_(this) {}
  void process(const c10::Warning& warning) override { messages.push_back(warning.msg()); }
  bool any(const std::string& part) const {
    return std::any_of(messages.begin(), messages.end(), [&](const std::string& message) {
      return message.find(part) != std::string::npos;
    });
  }
  std::vector<std::string> messages;

 private:
  c10::WarningUtils::WarningHandlerGuard guard_;
};

inline void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

}  // namespace shardstep::test
