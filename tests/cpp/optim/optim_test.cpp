#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string_view>

#include "shardstep/optim/adagrad.h"
#include "shardstep/optim/adam.h"
#include "shardstep/optim/adamw.h"
#include "shardstep/optim/sgd.h"
#include "support/torch.h"

namespace shardstep {
namespace {

using Tensors = std::vector<at::Tensor>;

// One parameter's step in double precision. `state` is zero where there was none before.
struct Step {
  at::Tensor before, grad;
  Tensors state, state_after;
  int64_t count = 0;
};

// The largest summand in magnitude that each result was rounded from, apart from its own old value.
struct Terms {
  at::Tensor update;
  Tensors state;
};

// ---- one interface for the four optimizers -----------------------------------------------------

template <typename OptionsT, typename StateT, typename PlainT, typename OursT>
struct Kit {
  using Options = OptionsT;
  using State = StateT;
  using Plain = PlainT;
  using Ours = OursT;
};

template <typename Base>
struct AdamLike : Base {
  using Options = typename Base::Options;
  static std::vector<Options> variants() {
    return {Options(1e-2),
            Options(1e-1).weight_decay(0.1),
            Options(1e-3).amsgrad(true).weight_decay(0.01),
            Options(1.0).betas({0.5, 0.9}).eps(1e-3),
            Options(0.0),
            Options(1e-3).betas({0.0, 0.0})};
  }
  static std::vector<at::Tensor*> tensors(typename Base::State& state) {
    std::vector<at::Tensor*> result{&state.exp_avg(), &state.exp_avg_sq()};
    if (state.max_exp_avg_sq().defined()) result.push_back(&state.max_exp_avg_sq());
    return result;
  }
  static int64_t steps(const typename Base::State& state) { return state.step(); }

  static Terms terms(const Options& options, const Step& step) {
    const auto [beta1, beta2] = options.betas();
    const double coupled_decay = std::is_same_v<Options, torch::optim::AdamOptions>
                                     ? options.weight_decay()
                                     : 0;  // AdamW's never meets the gradient
    const auto raw = at::maximum(step.grad.abs(), coupled_decay * step.before.abs());
    const auto average = at::maximum(beta1 * step.state[0].abs(), (1 - beta1) * raw);
    const auto square = at::maximum(beta2 * step.state[1], (1 - beta2) * raw * raw);
    const auto& spread = step.state_after.back();
    const auto denominator =
        spread.sqrt() / std::sqrt(1 - std::pow(beta2, step.count)) + options.eps();
    Terms result{options.lr() / (1 - std::pow(beta1, step.count)) * average / denominator,
                 {average, square}};
    if (options.amsgrad()) result.state.push_back(square);
    return result;
  }
};

struct AdamKit : AdamLike<Kit<torch::optim::AdamOptions, torch::optim::AdamParamState,
                              torch::optim::Adam, optim::Adam>> {};
struct AdamWKit : AdamLike<Kit<torch::optim::AdamWOptions, torch::optim::AdamWParamState,
                               torch::optim::AdamW, optim::AdamW>> {};

struct SGDKit
    : Kit<torch::optim::SGDOptions, torch::optim::SGDParamState, torch::optim::SGD, optim::SGD> {
  static std::vector<Options> variants() {
    return {Options(0.1),
            Options(0.1).weight_decay(0.1),
            Options(0.1).momentum(0.9),
            Options(0.1).momentum(0.9).dampening(0.3).weight_decay(0.01),
            Options(1.0).momentum(0.5).nesterov(true),
            Options(0.1).momentum(0.9).nesterov(true).weight_decay(0.1)};
  }
  static std::vector<at::Tensor*> tensors(State& state) { return {&state.momentum_buffer()}; }
  static int64_t steps(const State&) { return 0; }

  static Terms terms(const Options& options, const Step& step) {
    const auto raw = at::maximum(step.grad.abs(), options.weight_decay() * step.before.abs());
    if (step.state.empty()) return {options.lr() * raw, {}};
    const auto buffer = at::maximum(raw, options.momentum() * step.state[0].abs());
    return {options.lr() * buffer, {buffer}};
  }
};

struct AdagradKit : Kit<torch::optim::AdagradOptions, torch::optim::AdagradParamState,
                        torch::optim::Adagrad, optim::Adagrad> {
  static std::vector<Options> variants() {
    return {Options(0.1), Options(0.1).lr_decay(0.1), Options(0.1).weight_decay(0.1),
            Options(1.0).initial_accumulator_value(0.5).eps(1e-3)};
  }
  static std::vector<at::Tensor*> tensors(State& state) { return {&state.sum()}; }
  static int64_t steps(const State& state) { return state.step(); }

  static Terms terms(const Options& options, const Step& step) {
    const auto raw = at::maximum(step.grad.abs(), options.weight_decay() * step.before.abs());
    const double lr = options.lr() / (1 + (step.count - 1) * options.lr_decay());
    return {lr * raw / (step.state_after[0].sqrt() + options.eps()), {raw * raw}};
  }
};

// A state with momentum, so that every optimizer has something to keep.
torch::optim::AdamOptions stateful(AdamKit) { return {1e-2}; }
torch::optim::AdamWOptions stateful(AdamWKit) { return {1e-2}; }
torch::optim::SGDOptions stateful(SGDKit) { return torch::optim::SGDOptions(0.1).momentum(0.9); }
torch::optim::AdagradOptions stateful(AdagradKit) { return {0.1}; }

template <typename Kit>
typename Kit::State* state_of(torch::optim::Optimizer& optimizer, const at::Tensor& param) {
  auto found = optimizer.state().find(param.unsafeGetTensorImpl());
  return found == optimizer.state().end() ? nullptr
                                          : static_cast<typename Kit::State*>(found->second.get());
}

// ---- inputs ------------------------------------------------------------------------------------

Tensors make_params(at::ScalarType dtype) {
  Tensors params;
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{
           {0}, {1}, {}, {7}, {1000}, {33, 3}, {3, 0, 2}, {2, 3, 5, 7}, {1, 4097}}) {
    params.push_back(at::randn(shape, at::kDouble).to(dtype).requires_grad_());
  }
  return params;
}

Tensors copies(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) {
    result.push_back(tensor.detach().clone().requires_grad_(tensor.requires_grad()));
  }
  return result;
}

void set_grads(const Tensors& a, const Tensors& b, size_t i, const at::Tensor& grad) {
  a[i].mutable_grad() = grad.defined() ? grad.clone() : grad;
  b[i].mutable_grad() = grad.defined() ? grad.clone() : grad;
}

// Magnitudes over eight decades, some exact zeros.
at::Tensor random_grad(const at::Tensor& like) {
  const auto options = at::dtype(at::kDouble);
  const auto magnitude = at::pow(10.0, at::rand(like.sizes(), options) * 8 - 6);
  const auto kept = at::rand(like.sizes(), options) > 0.05;
  return (at::randn(like.sizes(), options) * magnitude * kept).to(like.scalar_type());
}

// Makes `to` start exactly where `from` stands.
template <typename Kit>
void copy_all(torch::optim::Optimizer& from, const Tensors& from_params,
              torch::optim::Optimizer& to, const Tensors& to_params) {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < from_params.size(); ++i) {
    to_params[i].copy_(from_params[i]);
    auto* state = state_of<Kit>(from, from_params[i]);
    if (!state) {
      to.state().erase(to_params[i].unsafeGetTensorImpl());
      continue;
    }
    auto copy = std::make_unique<typename Kit::State>(*state);
    for (auto* tensor : Kit::tensors(*copy)) *tensor = tensor->clone();
    to.state()[to_params[i].unsafeGetTensorImpl()] = std::move(copy);
  }
}

// ---- distance ----------------------------------------------------------------------------------

at::Tensor widened(const at::Tensor& tensor) {
  return tensor.detach().to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
}

// The distance between neighbouring numbers of `dtype` at each of the magnitudes.
at::Tensor spacing(const at::Tensor& magnitude, at::ScalarType dtype) {
  const auto [bits, min_exponent] = dtype == at::kDouble  ? std::pair(52, -1022)
                                    : dtype == at::kFloat ? std::pair(23, -126)
                                    : dtype == at::kHalf  ? std::pair(10, -14)
                                                          : std::pair(7, -126);
  const auto exponent = at::floor(at::log2(magnitude)).clamp_min(min_exponent);
  return at::pow(2.0, exponent - bits);
}

double max_ulps(const at::Tensor& a, const at::Tensor& b, const at::Tensor& magnitude,
                at::ScalarType dtype) {
  if (a.numel() == 0) return 0;
  return ((widened(a) - widened(b)).abs() / spacing(magnitude, dtype)).max().item<double>();
}

struct Distance {
  double settled = 0;  // parameters that are at least 32 times as large as their update
  double param = 0;    // all of them, in ulps of the parameter or its update, the larger
  double state = 0;    // of the largest summand

  void add(const Distance& other) {
    settled = std::max(settled, other.settled);
    param = std::max(param, other.param);
    state = std::max(state, other.state);
  }
};

template <typename Kit>
class Optim : public testing::Test {
 protected:
  using Options = typename Kit::Options;

  static void SetUpTestSuite() { at::set_num_threads(1); }
  void SetUp() override {
    const char* seed = std::getenv("SHARDSTEP_TEST_SEED");
    torch::manual_seed(seed ? std::strtoull(seed, nullptr, 10) : 1);
  }

  // The state before and after a step, widened.
  static Step begin(torch::optim::Optimizer& optimizer, const at::Tensor& param) {
    Step step{widened(param), widened(param.grad()), {}, {}, 0};
    if (auto* state = state_of<Kit>(optimizer, param)) {
      for (auto* tensor : Kit::tensors(*state)) step.state.push_back(widened(*tensor));
    }
    return step;
  }
  static void end(torch::optim::Optimizer& optimizer, const at::Tensor& param, Step& step) {
    auto* state = state_of<Kit>(optimizer, param);
    if (!state) return;
    step.count = Kit::steps(*state);
    for (auto* tensor : Kit::tensors(*state)) step.state_after.push_back(widened(*tensor));
    while (step.state.size() < step.state_after.size()) {
      step.state.push_back(at::zeros_like(step.before));
    }
  }

  // How far a parameter and its state are from where `wanted` has them, in ulps of `dtype`.
  static Distance distance(const at::Tensor& param, torch::optim::Optimizer& optimizer,
                           const at::Tensor& wanted, torch::optim::Optimizer& wanted_optimizer,
                           Step step, const Options& options, at::ScalarType dtype) {
    end(wanted_optimizer, wanted, step);
    const auto terms = Kit::terms(options, step);
    const auto size = at::maximum(step.before.abs(), widened(wanted).abs());
    const auto settled = size >= 32 * terms.update;
    Distance result;
    result.param = max_ulps(param, wanted, at::maximum(size, terms.update), dtype);
    result.settled =
        max_ulps(widened(param).masked_select(settled), widened(wanted).masked_select(settled),
                 size.masked_select(settled), dtype);
    auto* state = state_of<Kit>(optimizer, param);
    if (!state) return result;
    const auto tensors = Kit::tensors(*state);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto& after = step.state_after[i];
      const auto largest =
          at::maximum(at::maximum(after.abs(), step.state[i].abs()), terms.state[i]);
      result.state = std::max(result.state, max_ulps(*tensors[i], after, largest, dtype));
    }
    return result;
  }
};
using Kits = testing::Types<AdamKit, AdamWKit, SGDKit, AdagradKit>;
TYPED_TEST_SUITE(Optim, Kits);

// Which parameters have a gradient in a step: all, in turns, some of them late.
bool has_grad(size_t param, int step) {
  return (step + param) % 4 != 0 && !(param % 5 == 4 && step < 3);
}

// Every step starts from the same bits. Both sides round the same formulas, in another order, and
// the kernel keeps more in registers. So what one step may differ by is counted in ulps of the
// largest summand that a result was rounded from: a sum that cancels is no more exact than its
// summands. An update's own roundings (a product, a root, two quotients) come to at most 8 ulps of
// the update; so a parameter 32 times as large, as in training, differs by at most one of its own.
// Largest seen over 21 seeds: 8 ulps of an update, 3 of a state (the kernel interpolates averages).
constexpr double kUpdateUlps = 8;
constexpr double kStateUlps = 4;

TYPED_TEST(Optim, OneStepEqualsTorchWithinAnUlp) {
  using Kit = TypeParam;
  for (auto dtype : {at::kFloat, at::kDouble}) {
    Distance worst;
    for (const auto& options : Kit::variants()) {
      auto params = make_params(dtype), plain_params = copies(params);
      typename Kit::Ours ours(params, options);
      typename Kit::Plain plain(plain_params, options);
      std::vector<int64_t> counts(params.size());
      for (int step = 0; step < 16; ++step) {
        copy_all<Kit>(ours, params, plain, plain_params);
        std::vector<Step> steps(params.size());
        const auto before = copies(params);
        for (size_t i = 0; i < params.size(); ++i) {
          const bool given = has_grad(i, step);
          set_grads(params, plain_params, i, given ? random_grad(params[i]) : at::Tensor());
          if (given) steps[i] = this->begin(ours, params[i]);
          counts[i] += given;
        }
        ours.step();
        plain.step();
        for (size_t i = 0; i < params.size(); ++i) {
          auto* state = state_of<Kit>(ours, params[i]);
          auto* plain_state = state_of<Kit>(plain, plain_params[i]);
          ASSERT_EQ(state == nullptr, plain_state == nullptr);
          if (state) {
            ASSERT_EQ(Kit::steps(*state), Kit::steps(*plain_state));
            if (Kit::steps(*state) != 0) ASSERT_EQ(Kit::steps(*state), counts[i]);
          }
          if (has_grad(i, step)) {
            worst.add(
                this->distance(params[i], ours, plain_params[i], plain, steps[i], options, dtype));
          } else {
            ASSERT_TRUE(at::equal(params[i], before[i]));
          }
        }
      }
    }
    std::printf("%s: %.3g ulp of a settled parameter, %.3g of parameter or update, %.3g of state\n",
                c10::toString(dtype), worst.settled, worst.param, worst.state);
    EXPECT_LE(worst.settled, 1);
    EXPECT_LE(worst.param, kUpdateUlps);
    EXPECT_LE(worst.state, kStateUlps);
  }
}

// torch's own steps round to float16 and bfloat16 after every operation, the kernels once at the
// end. So the measure is torch's step in double precision, and ours may be no farther from it than
// torch's.
TYPED_TEST(Optim, LowPrecisionIsNoWorseThanTorch) {
  using Kit = TypeParam;
  for (auto dtype : {at::kHalf, at::kBFloat16}) {
    for (const auto& options : Kit::variants()) {
      auto params = make_params(dtype), plain_params = copies(params);
      typename Kit::Ours ours(params, options);
      typename Kit::Plain plain(plain_params, options);
      Distance worst, worst_plain;
      for (int step = 0; step < 6; ++step) {
        copy_all<Kit>(ours, params, plain, plain_params);
        auto exact_params = copies(params);
        for (auto& param : exact_params) param = widened(param).requires_grad_();
        typename Kit::Plain exact(exact_params, options);
        copy_all<Kit>(ours, params, exact, exact_params);
        std::vector<Step> steps(params.size());
        for (size_t i = 0; i < params.size(); ++i) {
          if (auto* state = state_of<Kit>(exact, exact_params[i])) {
            for (auto* tensor : Kit::tensors(*state)) *tensor = widened(*tensor);
          }
          const auto grad = random_grad(params[i]).clamp(-10, 10);
          set_grads(params, plain_params, i, grad);
          exact_params[i].mutable_grad() = widened(grad);
          steps[i] = this->begin(ours, params[i]);
        }
        ours.step();
        plain.step();
        exact.step();
        for (size_t i = 0; i < params.size(); ++i) {
          worst.add(
              this->distance(params[i], ours, exact_params[i], exact, steps[i], options, dtype));
          worst_plain.add(this->distance(plain_params[i], plain, exact_params[i], exact, steps[i],
                                         options, dtype));
        }
      }
      EXPECT_LE(worst.param, std::max(1.5, worst_plain.param)) << c10::toString(dtype);
      EXPECT_LE(worst.state, std::max(1.5, worst_plain.state)) << c10::toString(dtype);
    }
  }
}

// Steps both on one gradient each and expects the same bits in both.
template <typename Kit>
void expect_same_bits(const Tensors& params, const Tensors& grads) {
  // Clones keep dense strides but close gaps: views must be rebuilt.
  Tensors twins;
  for (const auto& param : params) {
    auto twin = at::empty_strided(param.sizes(), param.strides(), param.options());
    twins.push_back(twin.copy_(param.detach()));
  }
  typename Kit::Ours ours(params, stateful(Kit()));
  typename Kit::Plain plain(twins, stateful(Kit()));
  for (int step = 0; step < 3; ++step) {
    for (size_t i = 0; i < params.size(); ++i) {
      params[i].mutable_grad() = grads[i];
      twins[i].mutable_grad() = grads[i];
    }
    ours.step();
    plain.step();
    ASSERT_EQ(ours.param_groups()[0].params().size(), params.size());
    for (size_t i = 0; i < params.size(); ++i) {
      EXPECT_TRUE(at::equal(params[i], twins[i])) << "parameter " << i << ", step " << step;
    }
  }
}

TYPED_TEST(Optim, WhatTheKernelCannotWalkIsLeftToTorch) {
  const auto gaps = at::randn({4, 40});
  expect_same_bits<TypeParam>({gaps.narrow(1, 0, 20), at::randn({5, 6}), at::randn({64}),
                               at::randn({20}, at::kComplexFloat)},
                              {at::randn({4, 20}), at::randn({6, 5}).t(),
                               at::randn({1}).expand({64}), at::randn({20}, at::kComplexFloat)});
}

TYPED_TEST(Optim, DenseStridesStayFused) {
  using Kit = TypeParam;
  const auto options = stateful(Kit());
  Tensors params{at::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast),
                 at::randn({6, 5}).t()};
  auto twins = copies(params);
  typename Kit::Ours ours(params, options);
  typename Kit::Plain plain(twins, options);
  for (int step = 0; step < 4; ++step) {
    copy_all<Kit>(ours, params, plain, twins);
    std::vector<Step> steps;
    for (size_t i = 0; i < params.size(); ++i) {
      set_grads(params, twins, i, at::empty_like(params[i]).normal_());
      ASSERT_EQ(params[i].grad().strides(), params[i].strides());
      steps.push_back(this->begin(ours, params[i]));
    }
    ours.step();
    plain.step();
    for (size_t i = 0; i < params.size(); ++i) {
      const auto found =
          this->distance(params[i], ours, twins[i], plain, steps[i], options, at::kFloat);
      EXPECT_LE(found.settled, 1);
      EXPECT_LE(found.param, kUpdateUlps);
      EXPECT_LE(found.state, kStateUlps);
    }
  }
}

int kernel_calls = 0;
std::unique_ptr<at::ObserverContext> count_kernel(const at::RecordFunction& function) {
  kernel_calls += std::string_view(function.name()).starts_with("aten::_fused_");
  return nullptr;
}

int kernel_calls_in(torch::optim::Optimizer& optimizer) {
  kernel_calls = 0;
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(count_kernel));
  optimizer.step();
  at::removeCallback(handle);
  return kernel_calls;
}

TYPED_TEST(Optim, OneKernelCallTakesAllParametersOfADtype) {
  using Kit = TypeParam;
  auto params = make_params(at::kFloat);
  auto doubles = make_params(at::kDouble);
  params.insert(params.end(), doubles.begin(), doubles.end());
  for (size_t i = 0; i + 1 < params.size(); ++i) params[i].mutable_grad() = random_grad(params[i]);
  typename Kit::Ours ours(params, stateful(Kit()));
  EXPECT_EQ(kernel_calls_in(ours), 2);
  EXPECT_EQ(kernel_calls_in(ours), 2);
  // A parameter that comes late has a step counter, or a first momentum, of its own.
  params.back().mutable_grad() = random_grad(params.back());
  EXPECT_EQ(kernel_calls_in(ours), (std::is_same_v<Kit, SGDKit> ? 3 : 2));
  EXPECT_EQ(kernel_calls_in(ours), 2);
}

TYPED_TEST(Optim, SparseGradientsAreTorchsMatter) {
  using Kit = TypeParam;
  auto dense = at::randn({6, 2}), table = at::randn({6, 2});
  auto twins = copies({dense, table});
  const auto before = dense.clone();
  const auto sparse =
      at::sparse_coo_tensor(at::tensor({1, 4}, at::kLong).unsqueeze(0), at::randn({2, 2}), {6, 2});
  typename Kit::Ours ours({dense, table}, Kit::variants()[0]);
  typename Kit::Plain plain(twins, Kit::variants()[0]);
  dense.mutable_grad() = twins[0].mutable_grad() = at::randn({6, 2});
  table.mutable_grad() = twins[1].mutable_grad() = sparse;
  bool refused = false;
  try {
    plain.step();
  } catch (const c10::Error&) {
    refused = true;
  }
  if (refused) {
    EXPECT_THROW(ours.step(), c10::Error);
    EXPECT_TRUE(at::equal(dense, before));
    EXPECT_EQ(ours.param_groups()[0].params().size(), 2u);
  } else {
    ours.step();
    EXPECT_TRUE(at::equal(table, twins[1]));
    EXPECT_TRUE(at::allclose(dense, twins[0], 1e-6, 1e-7));
  }
}

// Saves `from` and loads it into `to`, as torch's own archives do.
void hand_over(torch::optim::Optimizer& from, torch::optim::Optimizer& to) {
  std::stringstream stream;
  torch::save(from, stream);
  torch::load(to, stream);
}

TYPED_TEST(Optim, StatePassesBetweenTorchAndOurs) {
  using Kit = TypeParam;
  auto params = make_params(at::kFloat), twins = copies(params);
  const auto options = stateful(Kit());
  typename Kit::Ours ours(params, options);
  typename Kit::Plain through(twins, options);
  auto reference_params = copies(params);
  typename Kit::Plain reference(reference_params, options);
  for (int step = 0; step < 9; ++step) {
    const bool ours_turn = step / 3 != 1;
    if (step == 3) {
      copy_all<Kit>(ours, params, through, twins);
      hand_over(ours, through);
    } else if (step == 6) {
      copy_all<Kit>(through, twins, ours, params);
      hand_over(through, ours);
    }
    for (size_t i = 0; i < params.size(); ++i) {
      const auto grad = at::randn_like(params[i]);
      set_grads(params, twins, i, grad);
      reference_params[i].mutable_grad() = grad;
    }
    if (ours_turn) {
      ours.step();
    } else {
      through.step();
    }
    reference.step();
  }
  for (size_t i = 0; i < params.size(); ++i) {
    EXPECT_TRUE(at::allclose(params[i], reference_params[i], 1e-5, 1e-6));
    auto *state = state_of<Kit>(ours, params[i]),
         *wanted = state_of<Kit>(reference, reference_params[i]);
    ASSERT_TRUE(state && wanted);
    EXPECT_EQ(Kit::steps(*state), Kit::steps(*wanted));
  }
}

TYPED_TEST(Optim, GroupsComeLaterAndStorageMoves) {
  using Kit = TypeParam;
  const auto options = stateful(Kit());
  auto later_options = options;
  later_options.lr(0.5);
  auto first = at::randn({70}).requires_grad_(), second = at::randn({9}).requires_grad_();
  auto twins = copies({first, second});
  typename Kit::Ours ours(Tensors{}, options);
  ours.add_param_group({{first}});
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(Tensors{twins[0]});
  groups.emplace_back(Tensors{twins[1]}, std::make_unique<typename Kit::Options>(later_options));
  typename Kit::Plain plain(groups, options);
  for (int step = 0; step < 6; ++step) {
    if (step == 2) {
      ours.add_param_group({{second}, std::make_unique<typename Kit::Options>(later_options)});
    }
    if (step == 4) {
      auto bucket = at::cat({second.detach(), first.detach()});
      second.set_data(bucket.narrow(0, 0, 9));
      first.set_data(bucket.narrow(0, 9, 70));
    }
    set_grads({first}, twins, 0, at::randn({70}));
    if (step >= 2) second.mutable_grad() = twins[1].mutable_grad() = at::randn({9});
    ours.step();
    plain.step();
    EXPECT_TRUE(at::allclose(first, twins[0], 1e-5, 1e-6));
    EXPECT_TRUE(at::allclose(second, twins[1], 1e-5, 1e-6));
  }
}

TYPED_TEST(Optim, ClosureRunsWithGradientsOn) {
  using Kit = TypeParam;
  auto param = at::ones({5}).requires_grad_();
  typename Kit::Ours ours({param}, stateful(Kit()));
  at::NoGradGuard no_grad;
  const auto loss = ours.step([&] {
    auto value = (param * param).sum();
    value.backward();
    return value;
  });
  EXPECT_EQ(loss.template item<float>(), 5.0f);
  EXPECT_TRUE((param < 1).all().template item<bool>());
  EXPECT_FALSE(ours.step().defined());
}

TYPED_TEST(Optim, NothingToDo) {
  using Kit = TypeParam;
  typename Kit::Ours empty(Tensors{}, stateful(Kit()));
  EXPECT_NO_THROW(empty.step());
  auto param = at::randn({3}).requires_grad_();
  const auto before = param.detach().clone();
  typename Kit::Ours no_grads({param}, stateful(Kit()));
  no_grads.add_param_group(torch::optim::OptimizerParamGroup(Tensors{}));
  EXPECT_NO_THROW(no_grads.step());
  EXPECT_TRUE(at::equal(param, before));
}

TYPED_TEST(Optim, AutogradNoticesTheStep) {
  using Kit = TypeParam;
  auto param = at::ones({5}).requires_grad_();
  typename Kit::Ours ours({param}, stateful(Kit()));
  param.mutable_grad() = at::ones({5});
  const auto loss = (param * param).sum();
  ours.step();
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST(OptimSGD, KeepsNoStateWithoutMomentum) {
  auto param = at::ones({5});
  optim::SGD sgd({param}, torch::optim::SGDOptions(0.1));
  param.mutable_grad() = at::ones({5});
  sgd.step();
  EXPECT_TRUE(sgd.state().empty());
}

// The kernel's float16 and bfloat16 loops leave whole SIMD blocks alone (pytorch issue 191763).
TEST(OptimSGD, LowPrecisionIsTorchs) {
  expect_same_bits<SGDKit>({at::randn({100}).to(at::kHalf), at::randn({100}).to(at::kBFloat16)},
                           {at::randn({100}).to(at::kHalf), at::randn({100}).to(at::kBFloat16)});
}

}  // namespace
}  // namespace shardstep
