// consolidate_state_dict, state_dict, load_state_dict: at any world size and sharding.

#include <gtest/gtest.h>

#include <filesystem>
#include <mutex>

#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep {
namespace {

using test::error_of;
using test::expect_equal;
using test::make_params;
using test::one_group;
using test::optimizers;
using test::plain_state_dict;
using test::run_ranks;
using test::train;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;

ZeroOptions options(const ProcessGroupPtr& group, Sharding sharding, bool view = false,
                    double cap_mb = 0) {
  return ZeroOptions()
      .process_group(group)
      .sharding(sharding)
      .parameters_as_bucket_view(view)
      .bucket_cap_mb(cap_mb);
}

TEST(ZeroState, EqualsThePlainOptimizersKeyForKey) {
  for (int world_size : {1, 2, 3, 5}) {
    run_ranks(world_size, [](const ProcessGroupPtr& group) {
      for (const auto& local : optimizers()) {
        for (auto sharding : {Sharding::kParameter, Sharding::kElement}) {
          auto params = make_params(), plain_params = make_params();
          const int to = group->getSize() - 1;
          ZeroRedundancyOptimizer zero(params, local, options(group, sharding, true, 1e-4));
          auto plain = local.make(one_group(plain_params));
          train(params, zero, 0, 3);
          train(plain_params, *plain, 0, 3);
          const auto dict = zero.consolidate_state_dict(to);
          ASSERT_EQ(dict.has_value(), group->getRank() == to);
          if (!dict) continue;
          expect_equal(*dict, plain_state_dict(local, *plain));
          expect_equal(zero.state_dict(), *dict);
        }
      }
    });
  }
}

TEST(ZeroState, NeedsNoConsolidatingAsLongAsThereIsNone) {
  run_ranks(3, [](const ProcessGroupPtr& group) {
    for (auto sharding : {Sharding::kParameter, Sharding::kElement}) {
      std::vector<at::Tensor> params{test::ones({9}).set_requires_grad(true),
                                     test::ones({7}).set_requires_grad(true)};
      const auto local = local_optimizer(AdamWOptions(0.01));
      ZeroRedundancyOptimizer zero(params, local, options(group, sharding));
      const auto plain = local.make(one_group(params));
      expect_equal(zero.state_dict(), plain_state_dict(local, *plain));
      zero.load_state_dict(zero.state_dict());
      expect_equal(zero.state_dict(), plain_state_dict(local, *plain));
      // Adagrad has state from the start, on a rank that owns nothing too.
      ZeroRedundancyOptimizer adagrad(params, torch::optim::AdagradOptions(0.01),
                                      options(group, sharding));
      const auto message = error_of([&] { adagrad.state_dict(); });
      EXPECT_NE(message.find("consolidate_state_dict"), std::string::npos) << message;
    }
  });
}

TEST(ZeroState, IsOnlyWhereItWasConsolidatedAndUntilTheNextStep) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    auto params = make_params();
    ZeroRedundancyOptimizer zero(params, AdamWOptions(0.01), options(group, Sharding::kElement));
    auto refused = [&] {
      const auto message = error_of([&] { zero.state_dict(); });
      EXPECT_NE(message.find("consolidate_state_dict"), std::string::npos) << message;
      EXPECT_NE(message.find("on all ranks"), std::string::npos) << message;
    };
    train(params, zero, 0, 1);
    refused();
    zero.consolidate_state_dict(1);
    if (group->getRank() == 1) {
      EXPECT_EQ(zero.state_dict().param_groups.size(), 1u);
    } else {
      refused();
    }
    train(params, zero, 1, 2);
    refused();
    // Every rank finds out by itself, before anything is sent.
    error_of<c10::ValueError>([&] { zero.consolidate_state_dict(2); });
    error_of<c10::ValueError>([&] { zero.consolidate_state_dict(-1); });
  });
}

TEST(ZeroState, ConsolidatedTensorsAreCopies) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    auto params = make_params();
    ZeroRedundancyOptimizer zero(params, AdamWOptions(0.01), options(group, Sharding::kParameter));
    train(params, zero, 0, 1);
    const auto dict = zero.consolidate_state_dict(0);
    const auto before = dict ? dict->state.at(0)["exp_avg"].toTensor().clone() : at::Tensor();
    train(params, zero, 1, 3);
    if (dict) EXPECT_TRUE(test::same(dict->state.at(0)["exp_avg"].toTensor(), before));
  });
}

// Trains at `world_size`, saves after 3 steps, and returns the dict and the parameters then.
struct Saved {
  StateDict dict;
  std::vector<at::Tensor> params;
};

Saved train_and_save(const LocalOptimizer& local, int world_size, Sharding sharding) {
  Saved saved;
  run_ranks(world_size, [&](const ProcessGroupPtr& group) {
    auto params = make_params();
    ZeroRedundancyOptimizer zero(params, local, options(group, sharding));
    train(params, zero, 0, 3);
    if (auto dict = zero.consolidate_state_dict(0)) {
      saved.dict = *dict;
      for (const auto& param : params) saved.params.push_back(param.detach().clone());
    }
  });
  return saved;
}

TEST(ZeroState, LoadsAtAnyWorldSizeAndShardingAndGoesOnBitForBit) {
  for (const auto& local : optimizers()) {
    auto plain_params = make_params();
    auto plain = local.make(one_group(plain_params));
    train(plain_params, *plain, 0, 6);
    for (auto [from, from_sharding, to, to_sharding] :
         std::vector<std::tuple<int, Sharding, int, Sharding>>{
             {3, Sharding::kElement, 2, Sharding::kParameter},
             {2, Sharding::kParameter, 4, Sharding::kElement},
             {4, Sharding::kElement, 1, Sharding::kElement},
             {1, Sharding::kParameter, 3, Sharding::kElement},
             {2, Sharding::kElement, 3, Sharding::kElement}}) {
      const auto saved = train_and_save(local, from, from_sharding);
      run_ranks(to, [&, to_sharding = to_sharding](const ProcessGroupPtr& group) {
        auto params = make_params();
        {
          at::NoGradGuard no_grad;
          for (size_t i = 0; i < params.size(); ++i) params[i].copy_(saved.params[i]);
        }
        ZeroRedundancyOptimizer zero(params, local, options(group, to_sharding, true));
        zero.load_state_dict(saved.dict);
        train(params, zero, 3, 6);
        expect_equal(params, plain_params, local.name);
      });
    }
  }
}

TEST(ZeroState, TakesAPlainOptimizersDictAndLeavesItAlone) {
  const auto local = local_optimizer(AdamWOptions(0.01));
  auto plain_params = make_params();
  auto plain = local.make(one_group(plain_params));
  train(plain_params, *plain, 0, 3);
  auto dict = plain_state_dict(local, *plain);
  dict.param_groups[0].options["lr"] = 0.5;
  const auto first = dict.state.at(0)["exp_avg"].toTensor();
  const auto before = first.clone();
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    for (auto sharding : {Sharding::kParameter, Sharding::kElement}) {
      auto params = make_params();
      ZeroRedundancyOptimizer zero(params, local, options(group, sharding));
      const auto& held = zero.param_groups()[0].options();
      zero.load_state_dict(dict);
      EXPECT_EQ(held.get_lr(), 0.5);
      EXPECT_EQ(zero.optim().param_groups()[0].options().get_lr(), 0.5);
      // This rank keeps its share and no more.
      EXPECT_LT(zero.local_state_bytes(), 2 * 4 * (20 * 5 + 20 + 2 + 33 + 108 + 77) * 3 / 4);
      train(params, zero, 3, 5);
    }
  });
  EXPECT_TRUE(test::same(first, before));
  EXPECT_TRUE(dict.state.at(0)["exp_avg"].toTensor().is_same(first));
}

TEST(ZeroState, RanksThatConsolidateToDifferentRanksAreAnErrorOnAll) {
  run_ranks(
      3,
      [](const ProcessGroupPtr& group) {
        auto params = make_params();
        ZeroRedundancyOptimizer zero(params, local_optimizer(AdamWOptions(0.01)),
                                     options(group, Sharding::kElement));
        train(params, zero, 0, 1);
        const int rank = group->getRank();
        const auto differ =
            error_of<c10::ValueError>([&] { zero.consolidate_state_dict(rank == 2 ? 2 : 0); });
        EXPECT_NE(differ.find("got 0 on rank 0 and 2 on rank 2"), std::string::npos) << differ;
        const auto outside =
            error_of<c10::ValueError>([&] { zero.consolidate_state_dict(rank == 1 ? 9 : 0); });
        EXPECT_NE(outside.find("got 9 on rank 1"), std::string::npos) << outside;
        EXPECT_EQ(zero.consolidate_state_dict(0).has_value(), rank == 0);
      },
      std::chrono::seconds(60), std::chrono::seconds(20));
}

TEST(ZeroState, WhatDoesNotFitIsNamedAndChangesNothing) {
  const auto local = local_optimizer(AdamWOptions(0.01));
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    for (auto sharding : {Sharding::kParameter, Sharding::kElement}) {
      auto params = make_params();
      ZeroRedundancyOptimizer zero(params, local, options(group, sharding));
      train(params, zero, 0, 2);
      const auto good = zero.consolidate_state_dict(0);
      if (!good) continue;
      // Options are values, but tensors are shared: a damaged dict gets others.
      auto copy = [&] {
        StateDict out;
        out.param_groups = good->param_groups;
        for (auto& group_copy : out.param_groups) {
          NamedValues options_copy;
          for (const auto& item : group_copy.options) options_copy.insert(item.key(), item.value());
          group_copy.options = options_copy;
        }
        for (const auto& [index, values] : good->state) {
          NamedValues values_copy;
          for (const auto& item : values) values_copy.insert(item.key(), item.value());
          out.state.emplace(index, values_copy);
        }
        return out;
      };
      auto refuse = [&](const StateDict& dict, const std::string& part) {
        const auto message = error_of<c10::ValueError>([&] { zero.load_state_dict(dict); });
        EXPECT_NE(message.find(part), std::string::npos) << message;
        EXPECT_EQ(zero.param_groups()[0].options().get_lr(), 0.01);
      };
      const auto bytes = zero.local_state_bytes();
      auto bad = copy();
      bad.param_groups.push_back(bad.param_groups[0]);
      refuse(bad, "expected 1 param groups, got 2");
      bad = copy();
      bad.param_groups[0].params.pop_back();
      bad.param_groups[0].options["lr"] = 3.0;
      refuse(bad, "expected 8 parameters in group 0, got 7");
      bad = copy();
      bad.param_groups[0].options["lr"] = 3.0;
      bad.state.at(0)["exp_avg"] = test::zeros({3, 3});
      refuse(bad, "expected exp_avg of parameter 0 with shape [20, 5], got [3, 3]");
      bad = copy();
      bad.state.emplace(99, bad.state.at(0));
      refuse(bad, "got index 99");
      bad = copy();
      bad.param_groups[0].options["maximize"] = true;
      refuse(bad, "maximize");
      bad = copy();
      bad.param_groups[0].options["lr"] = std::string("fast");
      refuse(bad, "lr");
      EXPECT_EQ(zero.local_state_bytes(), bytes);
    }
  });
}

TEST(ZeroState, SeveralGroupsAndTheirOptions) {
  run_ranks(3, [](const ProcessGroupPtr& group) {
    for (auto sharding : {Sharding::kParameter, Sharding::kElement}) {
      auto make_groups = [](std::vector<at::Tensor>& params) {
        std::vector<OptimizerParamGroup> groups;
        groups.emplace_back(std::vector<at::Tensor>(params.begin(), params.begin() + 3));
        groups.emplace_back(std::vector<at::Tensor>(params.begin() + 3, params.end()),
                            std::make_unique<AdamWOptions>(AdamWOptions(0.07).eps(1e-3)));
        return groups;
      };
      const auto local = local_optimizer(AdamWOptions(0.01));
      auto params = make_params(), plain_params = make_params(), resumed = make_params();
      ZeroRedundancyOptimizer zero(make_groups(params), local, options(group, sharding));
      auto plain = local.make(make_groups(plain_params));
      train(params, zero, 0, 3);
      train(plain_params, *plain, 0, 3);
      const auto dict = zero.consolidate_state_dict(0);
      if (dict) expect_equal(*dict, plain_state_dict(local, *plain));
      // Every rank loads what the plain optimizer has, which is the same.
      at::NoGradGuard no_grad;
      for (size_t i = 0; i < params.size(); ++i) resumed[i].copy_(params[i]);
      ZeroRedundancyOptimizer other(make_groups(resumed), local, options(group, sharding));
      other.load_state_dict(plain_state_dict(local, *plain));
      train(resumed, other, 3, 5);
      train(plain_params, *plain, 3, 5);
      expect_equal(resumed, plain_params);
    }
  });
}

TEST(ZeroState, TorchSaveAndLoadSpeakThePlainOptimizersFormat) {
  const auto path = (std::filesystem::temp_directory_path() /
                     ("shardstep_zero_state_" + std::to_string(::getpid()) + ".pt"))
                        .string();
  auto plain_params = make_params();
  const auto local = local_optimizer(AdamWOptions(0.01));
  auto plain = local.make(one_group(plain_params));
  train(plain_params, *plain, 0, 6);
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    auto params = make_params();
    ZeroRedundancyOptimizer zero(params, local, options(group, Sharding::kElement));
    train(params, zero, 0, 3);
    zero.consolidate_state_dict(0);
    if (group->getRank() == 0) {
      torch::serialize::OutputArchive archive;
      zero.save(archive);
      archive.save_to(path);
    }
    group->barrier({.device = test::device()})->wait();
    ZeroRedundancyOptimizer resumed(params, local, options(group, Sharding::kParameter));
    torch::serialize::InputArchive archive;
    archive.load_from(path);
    resumed.load(archive);
    train(params, resumed, 3, 6);
    expect_equal(params, plain_params);
  });
  // And the plain class of libtorch reads it.
  auto params = make_params();
  torch::optim::AdamW reader(params, AdamWOptions(0.3));
  torch::serialize::InputArchive archive;
  archive.load_from(path);
  reader.load(archive);
  EXPECT_EQ(reader.state().size(), 8u);
  EXPECT_EQ(reader.param_groups()[0].options().get_lr(), 0.01);
  std::filesystem::remove(path);
}

TEST(ZeroState, DifferentStepCountsPerParameterSurvive) {
  run_ranks(3, [](const ProcessGroupPtr& group) {
    auto params = make_params();
    ZeroRedundancyOptimizer zero(params, AdamWOptions(0.01), options(group, Sharding::kElement));
    for (int step = 0; step < 4; ++step) {
      for (auto& param : params) param.mutable_grad().reset();
      for (size_t i = 0; i < params.size(); i += 1 + step) {
        params[i].mutable_grad() = torch::ones_like(params[i].detach());
      }
      zero.step();
    }
    if (const auto dict = zero.consolidate_state_dict(0)) {
      std::vector<float> steps;
      for (const auto& [index, values] : dict->state) {
        steps.push_back(values["step"].toTensor().item<float>());
      }
      EXPECT_EQ(steps, (std::vector<float>{4, 1, 2, 2, 3, 1, 3, 1}));
    }
  });
}

}  // namespace
}  // namespace shardstep
