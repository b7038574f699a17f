// Param groups whose options have another type than the constructor's: one object equals two plain
// optimizers on the same gradients, bit for bit.

#include <gtest/gtest.h>

#include "shard/shard_engine.h"
#include "shardstep/shardstep.h"
#include "support/folder.h"
#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep {
namespace {

using torch::optim::OptimizerParamGroup;

std::vector<at::Tensor> params_with(const std::vector<std::vector<int64_t>>& shapes,
                                    uint64_t seed) {
  const auto random = test::generator(seed);
  std::vector<at::Tensor> params;
  for (const auto& sizes : shapes) params.push_back(torch::randn(sizes, random).requires_grad_());
  return params;
}

// Muon over matrices and AdamW over the rest, beside one ZeroRedundancyOptimizer over both.
struct TwoPlain {
  std::vector<at::Tensor> others = params_with({{9}, {7, 3}, {40}}, 1);
  std::vector<at::Tensor> matrices = params_with({{6, 4}, {4, 8}, {3, 5, 5}}, 2);
  std::vector<at::Tensor> plain_others = params_with({{9}, {7, 3}, {40}}, 1);
  std::vector<at::Tensor> plain_matrices = params_with({{6, 4}, {4, 8}, {3, 5, 5}}, 2);
  optim::AdamW adamw{plain_others, torch::optim::AdamWOptions(0.01)};
  optim::Muon muon{plain_matrices, optim::MuonOptions(0.02)};
  ZeroRedundancyOptimizer zero;

  static std::vector<OptimizerParamGroup> groups(const std::vector<at::Tensor>& others,
                                                 const std::vector<at::Tensor>& matrices) {
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(others);
    groups.emplace_back(matrices, std::make_unique<optim::MuonOptions>(0.02));
    return groups;
  }

  TwoPlain(const ProcessGroupPtr& group, int stage, Sharding sharding)
      : zero(groups(others, matrices), torch::optim::AdamWOptions(0.01),
             ZeroOptions().process_group(group).stage(stage).sharding(sharding)) {}

  static void backward(const std::vector<at::Tensor>& params, int step) {
    const auto random = test::generator(100 + step);
    auto loss = torch::zeros({});
    for (const auto& param : params) {
      loss = loss + (param * torch::randn(param.sizes(), random)).sum();
    }
    loss.backward();
  }

  void step(int number) {
    backward(others, number);
    backward(plain_others, number);
    backward(matrices, number);
    backward(plain_matrices, number);
    zero.step();
    adamw.step();
    muon.step();
    zero.zero_grad();
    adamw.zero_grad();
    muon.zero_grad();
    test::expect_equal(others, plain_others, c10::str("AdamW, step ", number));
    test::expect_equal(matrices, plain_matrices, c10::str("Muon, step ", number));
  }
};

class SeveralOptimizersTest : public testing::TestWithParam<int> {};

TEST_P(SeveralOptimizersTest, OneObjectEqualsTwoPlainOptimizers) {
  for (int stage : {1, 2}) {
    for (auto sharding : {Sharding::kElement, Sharding::kParameter}) {
      SCOPED_TRACE(c10::str(stage, " ", static_cast<int>(sharding)));
      test::run_ranks(GetParam(), [&](const ProcessGroupPtr& group) {
        TwoPlain both(group, stage, sharding);
        for (int step = 0; step < 3; ++step) {
          for (auto* one : {&both.zero.param_groups()[1], &both.muon.param_groups()[0]}) {
            one->options().set_lr(0.02 / (1 + step));  // as a scheduler does
          }
          both.step(step);
        }
      });
    }
  }
}

TEST(SeveralOptimizers, HaveOneStateAndOneCheckpoint) {
  const test::Folder folder;
  test::run_ranks(2, [&](const ProcessGroupPtr& group) {
    TwoPlain both(group, 2, Sharding::kElement);
    for (int step = 0; step < 2; ++step) both.step(step);
    both.zero.save_checkpoint(folder / "run");
    std::optional<StateDict> state;
    for (int to : {0, 1}) {
      if (auto found = both.zero.consolidate_state_dict(to)) state = *found;
    }
    EXPECT_TRUE(state->state.at(0).contains("exp_avg"));
    EXPECT_TRUE(state->state.at(3).contains("momentum_buffer"));
    EXPECT_TRUE(state->param_groups[1].options.contains("ns_steps"));
    for (bool from_checkpoint : {false, true}) {
      TwoPlain again(group, 1, Sharding::kParameter);
      at::NoGradGuard no_grad;
      const auto copy = [](const auto& from, const auto& to) {
        for (size_t i = 0; i < from.size(); ++i) at::Tensor(to[i]).copy_(from[i]);
      };
      copy(both.others, again.others);
      copy(both.others, again.plain_others);
      copy(both.matrices, again.matrices);
      copy(both.matrices, again.plain_matrices);
      const auto take_over = [](const LocalOptimizer& local, torch::optim::Optimizer& from,
                                torch::optim::Optimizer& to) {
        for (size_t i = 0; i < from.param_groups()[0].params().size(); ++i) {
          auto values = local.read_state(
              *from.state().at(from.param_groups()[0].params()[i].unsafeGetTensorImpl()));
          for (auto& item : values) item.value() = item.value().toTensor().clone();
          to.state()[to.param_groups()[0].params()[i].unsafeGetTensorImpl()] =
              local.write_state(values);
        }
      };
      take_over(local_optimizer(torch::optim::AdamWOptions()), both.adamw, again.adamw);
      take_over(local_optimizer(optim::MuonOptions()), both.muon, again.muon);
      from_checkpoint ? static_cast<void>(again.zero.load_checkpoint(folder / "run"))
                      : again.zero.load_state_dict(*state);
      at::AutoGradMode grad(true);
      for (int step = 2; step < 4; ++step) again.step(step);
    }
  });
}

TEST(SeveralOptimizers, WhatCannotBeIsRefusedOnEveryRank) {
  test::run_ranks(2, [&](const ProcessGroupPtr& group) {
    const auto refused = [&](std::vector<OptimizerParamGroup> groups, const std::string& what) {
      const auto message = test::error_of<c10::ValueError>([&] {
        ZeroRedundancyOptimizer zero(std::move(groups), torch::optim::AdamWOptions(0.01),
                                     ZeroOptions().process_group(group));
      });
      EXPECT_NE(message.find(what), std::string::npos) << message;
    };
    refused(TwoPlain::groups(params_with({{9}}, 1), params_with({{40}}, 2)),
            "expected matrices for Muon");
    ZeroRedundancyOptimizer zero(TwoPlain::groups(params_with({{9}}, 1), params_with({{4, 4}}, 2)),
                                 torch::optim::AdamWOptions(0.01),
                                 ZeroOptions().process_group(group));
    std::stringstream file;
    EXPECT_THROW(torch::save(zero, file), c10::ValueError);
  });
}

TEST(SeveralOptimizers, CostDecidesWhoOwnsWhat) {
  test::run_ranks(2, [&](const ProcessGroupPtr& group) {
    const auto owners = [&](const ZeroOptions& options) {
      ZeroRedundancyOptimizer zero(params_with({{8}, {4}, {2}, {2}}, 1),
                                   torch::optim::SGDOptions(0.1), options);
      std::vector<int> ranks;
      for (int64_t i = 0; i < 4; ++i) {
        ranks.push_back(zero.engine().partition().slices(i).front().rank);
      }
      return ranks;
    };
    const auto options = ZeroOptions().process_group(group);
    EXPECT_EQ(owners(options), (std::vector<int>{0, 1, 1, 1}));
    EXPECT_EQ(owners(ZeroOptions(options).cost([](const at::Tensor& param) {
                return param.numel() == 8 ? 1.0 : param.numel() == 4 ? 6.0 : 3.0;
              })),
              (std::vector<int>{0, 0, 1, 1}));
  });
}

// Powers of two: equal gradients have themselves as their average.
INSTANTIATE_TEST_SUITE_P(WorldSizes, SeveralOptimizersTest, testing::Values(1, 2, 4));

}  // namespace
}  // namespace shardstep
