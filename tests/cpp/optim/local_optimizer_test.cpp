#include "shardstep/local_optimizer.h"
#include "support/torch.h"

#include <gtest/gtest.h>

namespace shardstep {
namespace {

namespace torch_optim = torch::optim;

// Sets or replaces a value.
NamedValues with(NamedValues values, const std::string& key, c10::IValue value) {
  if (values.contains(key)) {
    values[key] = std::move(value);
  } else {
    values.insert(key, std::move(value));
  }
  return values;
}

NamedValues without(NamedValues values, const std::string& key) {
  values.erase(key);
  return values;
}

template <class Body>
std::string value_error(const Body& body) {
  try {
    body();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  ADD_FAILURE() << "no ValueError";
  return {};
}

TEST(LocalOptimizer, OptionsHavePythonsKeysInPythonsOrder) {
  auto keys = [](const LocalOptimizer& local) {
    return local.read_options(*local.defaults).keys();
  };
  using Keys = std::vector<std::string>;
  Keys adam = {"lr",
               "betas",
               "eps",
               "weight_decay",
               "amsgrad",
               "maximize",
               "foreach",
               "capturable",
               "differentiable",
               "fused",
               "decoupled_weight_decay"};
  EXPECT_EQ(keys(local_optimizer(torch_optim::AdamOptions())), adam);
  EXPECT_EQ(keys(local_optimizer(torch_optim::AdamWOptions())), adam);
  EXPECT_EQ(keys(local_optimizer(torch_optim::SGDOptions(1))),
            (Keys{"lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "foreach",
                  "differentiable", "fused"}));
  EXPECT_EQ(local_optimizer(torch_optim::RMSpropOptions()).name, "RMSprop");
}

TEST(LocalOptimizer, WriteOptionsTakesAllOrNothing) {
  auto local = local_optimizer(torch_optim::AdamWOptions(0.5));
  torch_optim::AdamWOptions target(7.0);
  auto good = local.read_options(*local.defaults);
  auto reset = [&] { target = torch_optim::AdamWOptions(7.0); };

  for (const auto& values :
       {good, with(good, "lr", at::scalar_tensor(0.5)), with(good, "foreach", true),
        with(good, "fused", true), with(good, "capturable", true), with(good, "maximize", {}),
        with(good, "initial_lr", 0.25), with(good, "unknown", false),
        with(good, "param_names", c10::List<std::string>({"a"})), without(good, "fused"),
        with(good, "betas", c10::List<double>({0.9, 0.999}))}) {
    reset();
    local.write_options(values, target);
    EXPECT_EQ(target, torch_optim::AdamWOptions(0.5));
  }
  const std::vector<std::pair<std::string, NamedValues>> bad = {
      {"lr", without(good, "lr")},
      {"lr", with(good, "lr", "fast")},
      {"lr", with(good, "lr", true)},
      {"lr", with(good, "lr", at::ones({2}))},
      {"betas", with(good, "betas", 0.9)},
      {"betas", with(good, "betas", c10::List<double>({0.9}))},
      {"amsgrad", with(good, "amsgrad", 1)},
      {"amsgrad", without(good, "amsgrad")},
      {"maximize", with(good, "maximize", true)},
      {"differentiable", with(good, "differentiable", true)},
      {"decoupled_weight_decay", with(good, "decoupled_weight_decay", false)},
      {"foreach", with(good, "foreach", 3)},
      {"momentum", with(good, "momentum", 0.9)}};
  for (const auto& [key, values] : bad) {
    reset();
    auto message = value_error([&] { local.write_options(values, target); });
    EXPECT_NE(message.find("'" + key + "'"), std::string::npos) << message;
    EXPECT_EQ(target, torch_optim::AdamWOptions(7.0)) << key;
  }
  torch_optim::SGDOptions other(1.0);
  EXPECT_THROW(local.write_options(good, other), c10::TypeError);
}

TEST(LocalOptimizer, StateGoesBothWaysWithoutACopy) {
  auto local = local_optimizer(torch_optim::AdamOptions());
  NamedValues values;
  values.insert("step", 3);
  values.insert("exp_avg", at::ones({2}));
  values.insert("exp_avg_sq", at::ones({2}));
  for (const c10::IValue& step :
       {c10::IValue(3), c10::IValue(3.0), c10::IValue(at::scalar_tensor(3.0, at::kFloat))}) {
    auto state = local.write_state(with(values, "step", step));
    EXPECT_EQ(static_cast<torch_optim::AdamParamState&>(*state).step(), 3);
    auto read = local.read_state(*state);
    EXPECT_EQ(read.keys(), (std::vector<std::string>{"step", "exp_avg", "exp_avg_sq"}));
    EXPECT_TRUE(read["exp_avg"].toTensor().is_same(values["exp_avg"].toTensor()));
    auto counter = read["step"].toTensor();
    EXPECT_EQ(counter.dim(), 0);
    EXPECT_EQ(counter.scalar_type(), at::kFloat);
  }
  for (const auto& bad :
       {with(values, "step", 2.5), with(values, "step", -1), with(values, "step", at::ones({2})),
        with(values, "exp_avg", 1.0), without(values, "exp_avg"), without(values, "step"),
        with(values, "sum", at::ones({2}))}) {
    value_error([&] { local.write_state(bad); });
  }
  EXPECT_TRUE(local_optimizer(torch_optim::SGDOptions(1))
                  .read_state(torch_optim::SGDParamState())
                  .is_empty());
}

TEST(LocalOptimizer, MakeKeepsAGroupsOptionsEvenWhereTheyEqualTheClasssDefaults) {
  auto local = local_optimizer(torch_optim::AdamOptions(0.5).weight_decay(0.1));
  std::vector<torch_optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{at::ones({1}, at::requires_grad())});
  groups.emplace_back(std::vector<at::Tensor>{at::ones({1}, at::requires_grad())},
                      std::make_unique<torch_optim::AdamOptions>(1e-3));
  auto optimizer = local.make(groups);
  auto options = [&](int i) -> torch_optim::AdamOptions& {
    return static_cast<torch_optim::AdamOptions&>(optimizer->param_groups()[i].options());
  };
  EXPECT_EQ(options(0), torch_optim::AdamOptions(0.5).weight_decay(0.1));
  EXPECT_EQ(options(1), torch_optim::AdamOptions(1e-3));
  auto* address = &options(1);
  local.assign_options(*local.defaults, options(1));
  EXPECT_EQ(&options(1), address);
  EXPECT_EQ(options(1), torch_optim::AdamOptions(0.5).weight_decay(0.1));
}

TEST(LocalOptimizer, LBFGSIsRefusedWithAReason) {
  auto message = value_error([] { local_optimizer(torch_optim::LBFGSOptions()); });
  EXPECT_NE(message.find("LBFGS cannot be sharded"), std::string::npos) << message;
}

// An optimizer of a user's own: SGD by the gradient's sign, with a count and an average.
struct SignOptions : torch_optim::OptimizerCloneableOptions<SignOptions> {
  explicit SignOptions(double lr = 0.1) : lr_(lr) {}
  TORCH_ARG(double, lr);
  TORCH_ARG(bool, average) = true;
  TORCH_ARG(std::string, mode) = "sign";

 public:
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { lr_ = lr; }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(average);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(mode);
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, average);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(std::string, mode);
  }
};

struct SignState : torch_optim::OptimizerCloneableParamState<SignState> {
  TORCH_ARG(int64_t, count) = 0;
  TORCH_ARG(at::Tensor, average);
  TORCH_ARG(at::Tensor, unused);

 public:
  void serialize(torch::serialize::OutputArchive& archive) const override {
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(count);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(average);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(unused);
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, count);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, average);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, unused);
  }
};

struct Sign : torch_optim::Optimizer {
  Sign(const std::vector<torch_optim::OptimizerParamGroup>& groups, SignOptions defaults)
      : Optimizer(groups, std::make_unique<SignOptions>(defaults)) {}
  at::Tensor step(LossClosure) override { return {}; }
};

struct SilentOptions : torch_optim::OptimizerCloneableOptions<SilentOptions> {};
struct SilentState : torch_optim::OptimizerCloneableParamState<SilentState> {};
struct Silent : torch_optim::Optimizer {
  Silent(const std::vector<torch_optim::OptimizerParamGroup>& groups, SilentOptions defaults)
      : Optimizer(groups, std::make_unique<SilentOptions>(defaults)) {}
  at::Tensor step(LossClosure) override { return {}; }
};

TEST(LocalOptimizer, CustomGoesThroughItsOwnSerialize) {
  auto local = custom_optimizer<Sign, SignOptions, SignState>(SignOptions(0.3), "Sign");
  EXPECT_EQ(local.name, "Sign");
  auto options = local.read_options(*local.defaults);
  EXPECT_EQ(options.keys(), (std::vector<std::string>{"lr", "average", "mode"}));
  SignOptions target(9);
  local.write_options(with(with(options, "mode", "other"), "initial_lr", 1.0), target);
  EXPECT_EQ(target.lr(), 0.3);
  EXPECT_EQ(target.mode(), "other");
  for (const auto& bad : {without(options, "lr"), with(options, "lr", "fast"),
                          with(options, "mode", 1), with(options, "unknown", 1)}) {
    value_error([&] { local.write_options(bad, target); });
    EXPECT_EQ(target.lr(), 0.3);
    EXPECT_EQ(target.mode(), "other");
  }

  SignState state;
  state.count(4).average(at::arange(3, at::kFloat));
  auto values = local.read_state(state);
  EXPECT_EQ(values.keys(), (std::vector<std::string>{"count", "average"}));
  auto again = local.write_state(values);
  const auto& typed = static_cast<const SignState&>(*again);
  EXPECT_EQ(typed.count(), 4);
  EXPECT_TRUE(at::equal(typed.average(), state.average()));
  EXPECT_FALSE(typed.unused().defined());
  state.average(at::empty({0}));
  EXPECT_EQ(local.read_state(state)["average"].toTensor().numel(), 0);

  std::vector<torch_optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{at::ones({1}, at::requires_grad())});
  EXPECT_EQ(local.make(groups)->param_groups()[0].options().get_lr(), 0.3);
}

TEST(LocalOptimizer, CustomWithoutSerializeSaysSo) {
  auto local = custom_optimizer<Silent, SilentOptions, SilentState>(SilentOptions(), "Silent");
  auto message = value_error([&] { local.read_options(*local.defaults); });
  EXPECT_NE(message.find("implement serialize(OutputArchive&)"), std::string::npos) << message;
  message = value_error([&] { local.read_state(SilentState()); });
  EXPECT_NE(message.find("Silent's state"), std::string::npos) << message;
  value_error([&] { local.write_state(NamedValues()); });
}

}  // namespace
}  // namespace shardstep
