#pragma once

// A model, gradients and plain optimizers for the tests of ZeroRedundancyOptimizer.

#include <functional>
#include <vector>

#include "shardstep/shardstep.h"
#include "support/device.h"
#include "support/test_support.h"
#include "support/torch.h"

namespace shardstep::test {

// As torch's, but made on the device: torch does not move a module's parameters to one that it does
// not know.
struct LinearImpl : torch::nn::Module {
  LinearImpl(int64_t in, int64_t out, bool with_bias = true)
      : weight(register_parameter("weight", on_device(torch::randn({out, in}) / 4))) {
    if (with_bias) bias = register_parameter("bias", on_device(torch::randn({out}) / 4));
  }
  at::Tensor forward(const at::Tensor& input) {
    return bias.defined() ? torch::linear(input, weight, bias) : torch::linear(input, weight);
  }
  at::Tensor weight, bias;
};
TORCH_MODULE(Linear);

// Shapes that are even, odd, empty, 0-d, and in another memory order.
inline std::vector<at::Tensor> make_params(uint64_t seed = 1) {
  const auto random = generator(seed);
  std::vector<at::Tensor> params;
  for (const auto& sizes : std::vector<std::vector<int64_t>>{
           {20, 5}, {20}, {0}, {1}, {}, {33}, {4, 3, 3, 3}, {7, 11}}) {
    params.push_back(on_device(torch::randn(sizes, random)));
  }
  params[6] = params[6].contiguous(at::MemoryFormat::ChannelsLast);
  for (auto& param : params) param.requires_grad_();
  return params;
}

// The gradients of one step, the same on every rank, as DDP leaves them. Every third parameter has
// none at times.
inline void set_gradients(const std::vector<at::Tensor>& params, int step) {
  const auto random = generator(1000 + step);
  for (size_t i = 0; i < params.size(); ++i) {
    const auto gradient = torch::randn(params[i].sizes(), random);
    auto& slot = at::Tensor(params[i]).mutable_grad();
    if ((step + i) % 3 == 2) {
      slot.reset();
    } else {
      // In the parameter's memory order, as autograd makes them.
      slot = torch::empty_like(params[i].detach()).copy_(gradient);
    }
  }
}

// One of each class, with all the state that it can have.
inline std::vector<LocalOptimizer> optimizers() {
  return {local_optimizer(torch::optim::AdamOptions(0.01).amsgrad(true)),
          local_optimizer(torch::optim::AdamWOptions(0.01)),
          local_optimizer(torch::optim::SGDOptions(0.1).momentum(0.9)),
          local_optimizer(torch::optim::AdagradOptions(0.1)),
          local_optimizer(torch::optim::RMSpropOptions(0.01).centered(true).momentum(0.5))};
}

// Steps `from` to `to`, without the last.
inline void train(std::vector<at::Tensor>& params, torch::optim::Optimizer& optimizer, int from,
                  int to) {
  for (int step = from; step < to; ++step) {
    set_gradients(params, step);
    optimizer.step();
  }
}

inline void expect_equal(const std::vector<at::Tensor>& got,
                         const std::vector<at::Tensor>& expected, const std::string& what = "") {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(same(got[i], expected[i]))
        << what << " parameter " << i << " differs by "
        << (got[i].cpu() - expected[i].cpu()).abs().max().item<double>();
  }
}

// Both optimizers make `steps` steps on the same gradients; the parameters agree after each.
inline void expect_same_steps(torch::optim::Optimizer& zero, const std::vector<at::Tensor>& params,
                              torch::optim::Optimizer& plain,
                              const std::vector<at::Tensor>& plain_params, int steps) {
  for (int step = 0; step < steps; ++step) {
    set_gradients(params, step);
    set_gradients(plain_params, step);
    zero.step();
    plain.step();
    expect_equal(params, plain_params, "step " + std::to_string(step));
  }
}

inline void expect_equal(const StateDict& got, const StateDict& expected) {
  ASSERT_EQ(got.param_groups.size(), expected.param_groups.size());
  for (size_t g = 0; g < got.param_groups.size(); ++g) {
    EXPECT_EQ(got.param_groups[g].params, expected.param_groups[g].params);
    EXPECT_EQ(got.param_groups[g].options.keys(), expected.param_groups[g].options.keys());
    for (const auto& item : got.param_groups[g].options) {
      EXPECT_TRUE(item.value() == expected.param_groups[g].options[item.key()]) << item.key();
    }
  }
  ASSERT_EQ(got.state.size(), expected.state.size());
  for (const auto& [index, values] : got.state) {
    ASSERT_TRUE(expected.state.count(index)) << index;
    const auto& others = expected.state.at(index);
    EXPECT_EQ(values.keys(), others.keys()) << index;
    for (const auto& item : values) {
      const auto a = item.value().toTensor(), b = others[item.key()].toTensor();
      EXPECT_EQ(a.sizes(), b.sizes()) << index << " " << item.key();
      EXPECT_EQ(a.strides(), b.strides()) << index << " " << item.key();
      EXPECT_EQ(a.scalar_type(), b.scalar_type()) << index << " " << item.key();
      EXPECT_TRUE(same(a, b)) << index << " " << item.key();
    }
  }
}

// What a plain optimizer's state dict would be.
inline StateDict plain_state_dict(const LocalOptimizer& local, torch::optim::Optimizer& plain) {
  StateDict dict;
  int64_t index = 0;
  for (const auto& group : std::as_const(plain).param_groups()) {
    auto& out = dict.param_groups.emplace_back();
    out.options = local.read_options(group.options());
    for (const auto& param : group.params()) {
      const auto found = plain.state().find(param.unsafeGetTensorImpl());
      if (found != plain.state().end()) dict.state.emplace(index, local.read_state(*found->second));
      out.params.push_back(index++);
    }
  }
  return dict;
}

inline std::vector<torch::optim::OptimizerParamGroup> one_group(std::vector<at::Tensor> params) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::move(params));
  return groups;
}

// The message of the exception of type E that `body` throws; a failure if it throws none.
template <class E = c10::Error>
std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    if (dynamic_cast<const E*>(&error) != nullptr) return error.what();
    ADD_FAILURE() << "another type of exception: " << error.what();
    return "";
  }
  ADD_FAILURE() << "no exception";
  return "";
}

}  // namespace shardstep::test
