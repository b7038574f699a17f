// Muon's properties; that it equals torch.optim.Muon, and that Python reads its state, is in
// state_dict_test.

#include <gtest/gtest.h>

#include "shard/partition.h"
#include "shardstep/optim/muon.h"
#include "support/test_support.h"
#include "support/torch.h"

namespace shardstep {
namespace {

at::Tensor random_matrix(at::IntArrayRef sizes, uint64_t seed) {
  return torch::randn(sizes, test::generator(seed)).requires_grad_();
}

TEST(Muon, TheUpdateIsCloseToOrthogonal) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{16, 16}, {8, 32}, {32, 8}}) {
    auto param = random_matrix(sizes, 1);
    const auto before = param.detach().clone();
    param.mutable_grad() = random_matrix(sizes, 2).detach();
    optim::Muon muon({param}, optim::MuonOptions(1).weight_decay(0));
    muon.step();
    const double factor = std::sqrt(std::max(1.0, double(sizes[0]) / double(sizes[1])));
    const auto singular = std::get<1>(torch::linalg_svd((param - before).detach() / factor, false));
    EXPECT_GT(singular.min().item<double>(), 0.3);
    EXPECT_LT(singular.max().item<double>(), 1.4);
  }
}

// Experts.
TEST(Muon, AStackOfMatricesIsUpdatedOneMatrixAtATime) {
  auto stack = random_matrix({2, 3, 4, 6}, 1);
  std::vector<at::Tensor> apart;
  for (int64_t i = 0; i < 6; ++i) {
    apart.push_back(stack.detach().reshape({6, 4, 6})[i].clone().requires_grad_());
  }
  optim::Muon together({stack}), each(apart);
  for (int step = 0; step < 3; ++step) {
    const auto gradient = random_matrix({2, 3, 4, 6}, 10 + step).detach();
    stack.mutable_grad() = gradient;
    for (int64_t i = 0; i < 6; ++i) apart[i].mutable_grad() = gradient.reshape({6, 4, 6})[i];
    together.step();
    each.step();
  }
  for (int64_t i = 0; i < 6; ++i) {
    EXPECT_TRUE(at::equal(stack.detach().reshape({6, 4, 6})[i], apart[i])) << i;
  }
}

TEST(Muon, SavesAndLoads) {
  auto param = random_matrix({4, 6}, 1), other = param.detach().clone().requires_grad_();
  optim::Muon muon({param}, optim::MuonOptions(0.1).adjust_lr_fn("match_rms_adamw"));
  param.mutable_grad() = random_matrix({4, 6}, 2).detach();
  muon.step();
  std::stringstream file;
  torch::save(muon, file);
  optim::Muon again({other});
  torch::load(again, file);
  EXPECT_EQ(static_cast<optim::MuonOptions&>(again.param_groups()[0].options()),
            static_cast<optim::MuonOptions&>(muon.param_groups()[0].options()));
  at::NoGradGuard no_grad;
  other.copy_(param);
  other.mutable_grad() = param.grad();
  muon.step();
  again.step();
  EXPECT_TRUE(at::equal(param, other));
}

TEST(Muon, GroupsKeepTheirOptions) {
  using torch::optim::OptimizerParamGroup;
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{random_matrix({3, 3}, 1)});
  groups.emplace_back(std::vector{random_matrix({3, 3}, 2)},
                      std::make_unique<optim::MuonOptions>(0.5));
  optim::Muon muon(groups, optim::MuonOptions(0.25));
  muon.add_param_group(OptimizerParamGroup(std::vector{random_matrix({3, 3}, 3)},
                                           std::make_unique<optim::MuonOptions>(0.125)));
  EXPECT_EQ(muon.param_groups()[0].options().get_lr(), 0.25);
  EXPECT_EQ(muon.param_groups()[1].options().get_lr(), 0.5);
  EXPECT_EQ(muon.param_groups()[2].options().get_lr(), 0.125);
}

TEST(Muon, RefusesWhatIsNoMatrixAndOptionsThatMakeNoSense) {
  using optim::Muon, optim::MuonOptions;
  EXPECT_THROW(Muon({random_matrix({3}, 1)}), c10::ValueError);
  const auto matrix = random_matrix({3, 3}, 1);
  EXPECT_THROW(Muon({matrix}, MuonOptions(-1)), c10::ValueError);
  EXPECT_THROW(Muon({matrix}, MuonOptions().ns_steps(100)), c10::ValueError);
  EXPECT_THROW(optim::muon_cost(matrix, -1), c10::ValueError);
  EXPECT_THROW(Muon({matrix}, MuonOptions().adjust_lr_fn("other")), c10::ValueError);
}

// The hidden matrices of GPT-2, small to XL: no rank has more than 10 % above an even share of the
// operations.
TEST(Muon, TheOperationsOfGpt2AreDividedEvenly) {
  for (const auto& [width, layers] :
       std::vector<std::pair<int64_t, int>>{{768, 12}, {1024, 24}, {1280, 36}, {1600, 48}}) {
    for (int ranks = 2; ranks <= 8; ++ranks) {
      std::vector<ParamSpec> specs;
      double total = 0;
      for (int layer = 0; layer < layers; ++layer) {
        for (const auto& [rows, columns] : std::vector<std::pair<int64_t, int64_t>>{
                 {3 * width, width}, {width, width}, {4 * width, width}, {width, 4 * width}}) {
          const auto shape = at::empty({rows, columns}, at::TensorOptions().device(at::kMeta));
          specs.push_back({.numel = rows * columns, .cost = optim::muon_cost(shape)});
          total += *specs.back().cost;
        }
      }
      Partition partition(Sharding::kParameter, ranks);
      partition.add_groups({specs});
      for (int rank = 0; rank < ranks; ++rank) {
        double own = 0;
        for (const auto& slice : partition.owned(rank, 0)) own += *specs[slice.param].cost;
        EXPECT_NEAR(own, total / ranks, 0.1 * total / ranks) << width << " on " << ranks;
      }
    }
  }
}

}  // namespace
}  // namespace shardstep
