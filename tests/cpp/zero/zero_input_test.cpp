// What ZeroRedundancyOptimizer accepts and refuses; ranks that disagree; user-defined optimizers.

#include <gtest/gtest.h>

#include "shard/shard_engine.h"
#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep {
namespace {

using test::error_of;
using test::expect_equal;
using test::make_params;
using test::one_group;
using test::run_ranks;
using test::set_gradients;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;

constexpr Sharding kShardings[] = {Sharding::kParameter, Sharding::kElement};

// The message with which every rank refuses these parameters.
void expect_refused(const std::vector<at::Tensor>& params, Sharding sharding,
                    const std::string& part) {
  for (int world_size : {1, 2}) {
    run_ranks(world_size, [&](const ProcessGroupPtr& group) {
      const auto message = error_of<c10::ValueError>([&] {
        ZeroRedundancyOptimizer zero(params, AdamWOptions(0.01),
                                     ZeroOptions().process_group(group).sharding(sharding));
      });
      EXPECT_NE(message.find(part), std::string::npos) << message;
    });
  }
}

TEST(ZeroInput, RefusesWhatCannotBeOptimized) {
  for (auto sharding : kShardings) {
    expect_refused({}, sharding, "expected parameters to optimize, got none");
    expect_refused({at::Tensor()}, sharding, "undefined");
    expect_refused({torch::ones({3}).to_sparse()}, sharding, "to be dense, got layout Sparse");
    expect_refused({torch::ones({4, 4}).slice(1, 0, 4, 2)}, sharding, "without gaps or overlap");
    const auto whole = torch::zeros({10});
    expect_refused({whole.slice(0, 0, 6), whole.slice(0, 4, 10)}, sharding, "that share some");
  }
  expect_refused({torch::zeros({2}), torch::zeros({2}, at::kDouble)}, Sharding::kParameter,
                 "one dtype");
}

TEST(ZeroInput, RefusesAParameterInTwoGroups) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    auto params = make_params();
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(params);
    groups.emplace_back(std::vector<at::Tensor>{params[1]});
    const auto message = error_of<c10::ValueError>([&] {
      ZeroRedundancyOptimizer zero(groups, AdamWOptions(0.01), ZeroOptions().process_group(group));
    });
    EXPECT_NE(message.find("every parameter once"), std::string::npos) << message;
  });
}

TEST(ZeroInput, NonLeafIsRefusedAsByTorch) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    auto leaf = torch::ones({3}).requires_grad_();
    error_of([&] {
      ZeroRedundancyOptimizer zero({leaf * 2}, AdamWOptions(0.01),
                                   ZeroOptions().process_group(group));
    });
  });
}

TEST(ZeroInput, TiedWeightsCountOnce) {
  for (auto sharding : kShardings) {
    run_ranks(2, [=](const ProcessGroupPtr& group) {
      auto params = make_params(), plain_params = make_params();
      auto tied = params;
      tied.push_back(params[0]);
      const auto local = local_optimizer(AdamWOptions(0.01));
      ZeroRedundancyOptimizer zero(tied, local,
                                   ZeroOptions().process_group(group).sharding(sharding));
      EXPECT_EQ(zero.engine().param_count(), 8);
      auto plain = local.make(one_group(plain_params));
      test::expect_same_steps(zero, params, *plain, plain_params, 3);
      const auto dict = zero.consolidate_state_dict();
      if (dict) {
        EXPECT_EQ(dict->param_groups[0].params.size(), 8u);
      }
    });
  }
}

TEST(ZeroInput, SmallAndEmptyModelsOnManyRanks) {
  for (auto sharding : kShardings) {
    for (bool view : {false, true}) {
      run_ranks(4, [=](const ProcessGroupPtr& group) {
        const std::vector<std::vector<std::vector<int64_t>>> models{
            {{1}}, {{}}, {{0}}, {{0}, {2, 0}}, {{3}, {0}, {1}}};
        for (const auto& shapes : models) {
          std::vector<at::Tensor> params;
          for (const auto& sizes : shapes) params.push_back(torch::ones(sizes).requires_grad_());
          auto plain_params = params;
          for (auto& param : plain_params) param = param.detach().clone().requires_grad_();
          const auto local = local_optimizer(AdamWOptions(0.1));
          ZeroRedundancyOptimizer zero(
              params, local,
              ZeroOptions().process_group(group).sharding(sharding).parameters_as_bucket_view(
                  view));
          auto plain = local.make(one_group(plain_params));
          for (int step = 0; step < 2; ++step) {
            for (auto* all : {&params, &plain_params}) {
              for (auto& param : *all) param.mutable_grad() = torch::ones_like(param.detach());
            }
            zero.step();
            plain->step();
          }
          expect_equal(params, plain_params);
          if (const auto dict = zero.consolidate_state_dict(3)) {
            expect_equal(*dict, test::plain_state_dict(local, *plain));
            zero.load_state_dict(*dict);
          }
        }
      });
    }
  }
}

TEST(ZeroInput, ParametersWithoutGradientsAreLeftAlone) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    std::vector<at::Tensor> params{torch::ones({5}), torch::ones({5})};  // all frozen
    ZeroRedundancyOptimizer zero(params, AdamWOptions(0.01), ZeroOptions().process_group(group));
    zero.step();
    for (const auto& param : params) EXPECT_TRUE(at::equal(param, torch::ones({5})));
    EXPECT_EQ(zero.engine().traffic().bytes_sent, 0);
    const auto dict = zero.consolidate_state_dict();
    if (dict) {
      EXPECT_TRUE(dict->state.empty());
    }
  });
}

TEST(ZeroInput, SparseGradientsAreRefusedByElement) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    std::vector<at::Tensor> params{torch::ones({40, 2}).requires_grad_()};
    ZeroRedundancyOptimizer zero(params, AdamWOptions(0.01),
                                 ZeroOptions().process_group(group).sharding(Sharding::kElement));
    params[0].mutable_grad() = torch::ones({40, 2}).to_sparse();
    const auto message = error_of<c10::ValueError>([&] { zero.step(); });
    EXPECT_NE(message.find("dense gradient"), std::string::npos) << message;
  });
}

TEST(ZeroInput, RanksThatDifferAreNamedOnEveryRank) {
  auto expect_difference = [](const std::function<void(std::vector<OptimizerParamGroup>&,
                                                       AdamWOptions&, ZeroOptions&)>& change,
                              const std::vector<std::string>& parts) {
    run_ranks(
        3,
        [&](const ProcessGroupPtr& group) {
          auto groups = one_group(make_params());
          auto defaults = AdamWOptions(0.01);
          auto zero_options = ZeroOptions().process_group(group);
          if (group->getRank() == 2) change(groups, defaults, zero_options);
          const auto message = error_of<c10::ValueError>(
              [&] { ZeroRedundancyOptimizer zero(groups, defaults, zero_options); });
          for (const auto& part : parts) {
            EXPECT_NE(message.find(part), std::string::npos) << part << " is not in: " << message;
          }
          EXPECT_NE(message.find(c10::str("(rank ", group->getRank(), " of 3)")), std::string::npos)
              << message;
        },
        std::chrono::seconds(20));
  };
  using Groups = std::vector<OptimizerParamGroup>;
  expect_difference([](Groups& groups, AdamWOptions&,
                       ZeroOptions&) { groups[0].params()[3] = torch::ones({2}).requires_grad_(); },
                    {"parameter 3 of group 0", "[1]", "[2]", "on rank 2"});
  expect_difference(
      [](Groups& groups, AdamWOptions&, ZeroOptions&) {
        for (auto& param : groups[0].params()) {
          param = param.detach().to(at::kDouble).requires_grad_();
        }
      },
      {"parameter 0 of group 0", "Float", "Double", "on rank 2"});
  expect_difference(
      [](Groups& groups, AdamWOptions&, ZeroOptions&) { groups[0].params().pop_back(); },
      {"parameter 7 of group 0", "nothing more", "on rank 2"});
  expect_difference([](Groups& groups, AdamWOptions&,
                       ZeroOptions&) { groups[0].params()[5].set_requires_grad(false); },
                    {"parameter 5 of group 0", "frozen", "on rank 2"});
  expect_difference(
      [](Groups&, AdamWOptions& defaults, ZeroOptions&) { defaults.weight_decay(0.5); },
      {"weight_decay=0.5", "on rank 2"});
  expect_difference(
      [](Groups&, AdamWOptions&, ZeroOptions& zero) { zero.sharding(Sharding::kElement); },
      {"sharding by parameter", "sharding by element", "on rank 2"});
  expect_difference([](Groups&, AdamWOptions&, ZeroOptions& zero) { zero.overlap_with_ddp(true); },
                    {"overlap 0", "overlap 1", "on rank 2"});
  expect_difference(
      [](Groups& groups, AdamWOptions&, ZeroOptions&) {
        groups.emplace_back(std::vector<at::Tensor>{torch::ones({1})});
      },
      {"group 1", "nothing more", "on rank 2"});
}

TEST(ZeroInput, AMistakeOnOneRankIsAnErrorOnAll) {
  run_ranks(
      3,
      [](const ProcessGroupPtr& group) {
        auto params = make_params();
        if (group->getRank() == 1) params[2] = at::Tensor();
        const auto message = error_of<c10::ValueError>([&] {
          ZeroRedundancyOptimizer zero(params, AdamWOptions(0.01),
                                       ZeroOptions().process_group(group));
        });
        EXPECT_NE(message.find("undefined"), std::string::npos) << message;
        if (group->getRank() != 1) {
          EXPECT_NE(message.find("rank 1 failed with"), std::string::npos) << message;
        }
      },
      std::chrono::seconds(20));
}

// Every rank receives it from every rank.
TEST(ZeroInput, AVeryLongErrorIsCutOnOtherRanks) {
  static constexpr size_t kBytes = 300000;
  run_ranks(
      2,
      [](const ProcessGroupPtr& group) {
        auto params = make_params();
        auto local = local_optimizer(AdamWOptions(0.01));
        local.check_param = [&](const at::Tensor&) {
          std::string text = "x";  // so that a character of two bytes lies across the limit
          while (text.size() < kBytes) text += "\u00e9";
          TORCH_CHECK_VALUE(group->getRank() == 0, text);
        };
        const auto message = error_of<c10::ValueError>([&] {
          ZeroRedundancyOptimizer zero(params, local, ZeroOptions().process_group(group));
        });
        if (group->getRank() == 1) {
          EXPECT_GE(message.size(), kBytes);
          return;
        }
        EXPECT_NE(message.find("rank 1 failed with: x\u00e9"), std::string::npos);
        const auto end = message.find("... (cut: 30");
        ASSERT_NE(end, std::string::npos) << message.size();
        EXPECT_EQ(message.substr(end - 2, 2), "\u00e9");
        EXPECT_LT(end, size_t{70000});
      },
      std::chrono::seconds(20));
}

TEST(ZeroInput, AddedGroupsThatDifferChangeNothing) {
  run_ranks(
      2,
      [](const ProcessGroupPtr& group) {
        auto params = make_params(), plain_params = make_params();
        const auto local = local_optimizer(AdamWOptions(0.01));
        ZeroRedundancyOptimizer zero(params, local, ZeroOptions().process_group(group));
        auto plain = local.make(one_group(plain_params));
        const std::vector<at::Tensor> added{torch::ones({3 + group->getRank()})};
        error_of<c10::ValueError>([&] { zero.add_param_group(OptimizerParamGroup(added)); });
        EXPECT_EQ(zero.param_groups().size(), 1u);
        error_of<c10::ValueError>(
            [&] { zero.add_param_group(OptimizerParamGroup(std::vector<at::Tensor>{params[0]})); });
        EXPECT_EQ(zero.param_groups().size(), 1u);
        test::expect_same_steps(zero, params, *plain, plain_params, 2);
      },
      std::chrono::seconds(20));
}

TEST(ZeroInput, LbfgsIsRefusedWithTheReason) {
  run_ranks(1, [](const ProcessGroupPtr& group) {
    const auto message = error_of<c10::ValueError>([&] {
      ZeroRedundancyOptimizer zero(make_params(), torch::optim::LBFGSOptions(1),
                                   ZeroOptions().process_group(group));
    });
    EXPECT_NE(message.find("all parameters at once"), std::string::npos) << message;
  });
}

TEST(ZeroInput, NoDefaultGroupSaysWhatToDo) {
  const auto message =
      error_of([] { ZeroRedundancyOptimizer zero(make_params(), AdamWOptions()); });
  EXPECT_NE(message.find("init_process_group"), std::string::npos) << message;
}

// An optimizer of a user's own that needs whole parameters: the step is scaled by the norm of the
// gradient, and options count the steps.
struct NormedOptions : torch::optim::OptimizerCloneableOptions<NormedOptions> {
  NormedOptions(double lr = 0.1) : lr_(lr) {}
  TORCH_ARG(double, lr) = 0.1;
  TORCH_ARG(int64_t, rounds) = 0;

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    c10::IValue value;
    archive.read("lr", value);
    lr_ = value.toDouble();
    archive.read("rounds", value);
    rounds_ = value.toInt();
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("lr", c10::IValue(lr_));
    archive.write("rounds", c10::IValue(rounds_));
  }
  double get_lr() const override { return lr_; }
  void set_lr(const double lr) override { lr_ = lr; }
};

struct NormedState : torch::optim::OptimizerCloneableParamState<NormedState> {
  TORCH_ARG(int64_t, seen) = 0;
  TORCH_ARG(at::Tensor, largest_row);

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    c10::IValue value;
    archive.read("seen", value);
    seen_ = value.toInt();
    archive.read("largest_row", largest_row_);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("seen", c10::IValue(seen_));
    archive.write("largest_row", largest_row_);
  }
};

class Normed : public torch::optim::Optimizer {
 public:
  Normed(const std::vector<OptimizerParamGroup>& groups, NormedOptions defaults)
      : Optimizer(groups, std::make_unique<NormedOptions>(defaults)) {}
  at::Tensor step(LossClosure closure = nullptr) override {
    at::NoGradGuard no_grad;
    at::Tensor loss;
    if (closure) {
      at::AutoGradMode grad(true);
      loss = closure();
    }
    for (auto& group : param_groups_) {
      auto& options = static_cast<NormedOptions&>(group.options());
      options.rounds(options.rounds() + 1);
      for (auto& param : group.params()) {
        if (!param.grad().defined()) continue;
        auto& state = state_[param.unsafeGetTensorImpl()];
        if (!state) state = std::make_unique<NormedState>();
        auto& normed = static_cast<NormedState&>(*state);
        normed.seen(normed.seen() + 1);
        // A state of another shape than the parameter's, large enough to be sent by itself.
        const auto row = param.grad().reshape({-1, 1}).abs().amax({1}).repeat({20});
        normed.largest_row(normed.largest_row().defined() ? at::maximum(normed.largest_row(), row)
                                                          : row);
        param.sub_(param.grad() / (param.grad().norm() + normed.seen()), options.lr());
      }
    }
    return loss;
  }
};

TEST(ZeroInput, UsersOwnOptimizer) {
  const auto local =
      custom_optimizer<Normed, NormedOptions, NormedState>(NormedOptions(0.2), "Normed");
  run_ranks(3, [&](const ProcessGroupPtr& group) {
    auto params = make_params(), plain_params = make_params();
    params.erase(params.begin() + 2);  // amax of nothing is not defined
    plain_params.erase(plain_params.begin() + 2);
    ZeroRedundancyOptimizer zero(params, local, ZeroOptions().process_group(group));
    Normed plain(one_group(plain_params), NormedOptions(0.2));
    auto both = [&](int from, int to, torch::optim::Optimizer& sharded) {
      for (int step = from; step < to; ++step) {
        set_gradients(params, step);
        set_gradients(plain_params, step);
        sharded.step();
        plain.step();
        expect_equal(params, plain_params);
      }
    };
    both(0, 3, zero);
    // What the local optimizer changes in its options shows in ours.
    EXPECT_EQ(static_cast<NormedOptions&>(zero.param_groups()[0].options()).rounds(), 3);
    const auto dict = zero.consolidate_state_dict(0);
    if (!dict) {
      both(3, 5, zero);
      return;
    }
    for (const auto& [index, values] : dict->state) {
      const auto& expected = static_cast<const NormedState&>(
          *plain.state().at(plain_params[index].unsafeGetTensorImpl()));
      EXPECT_EQ(values["seen"].toInt(), expected.seen());
      EXPECT_TRUE(at::equal(values["largest_row"].toTensor(), expected.largest_row()));
    }
    zero.load_state_dict(*dict);
    both(3, 5, zero);
  });
}

TEST(ZeroInput, UsersOwnOptimizerMustBeElementwiseToBeCut) {
  auto local = custom_optimizer<Normed, NormedOptions, NormedState>(NormedOptions(0.2), "Normed");
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    const auto options = ZeroOptions().process_group(group).sharding(Sharding::kElement);
    const auto message = error_of<c10::ValueError>(
        [&] { ZeroRedundancyOptimizer zero(make_params(), local, options); });
    EXPECT_NE(message.find("elementwise(true)"), std::string::npos) << message;
    // The user's word counts.
    auto said = options;
    ZeroRedundancyOptimizer zero(make_params(), local, said.elementwise(true));
  });
  local.elementwise = true;
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    ZeroRedundancyOptimizer zero(make_params(), local,
                                 ZeroOptions().process_group(group).sharding(Sharding::kElement));
  });
}

// An LBFGS that hides behind a factory.
TEST(ZeroInput, LbfgsIsRefusedHoweverItIsMade) {
  auto local = local_optimizer(torch::optim::SGDOptions(0.1));
  local.name = "Mine";
  local.make = [](std::vector<torch::optim::OptimizerParamGroup> groups) {
    return std::make_unique<torch::optim::LBFGS>(std::move(groups), torch::optim::LBFGSOptions());
  };
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    for (auto sharding : {Sharding::kParameter, Sharding::kElement}) {
      const auto options = ZeroOptions().process_group(group).sharding(sharding);
      const auto message = error_of<c10::ValueError>(
          [&] { ZeroRedundancyOptimizer zero(make_params(), local, options); });
      EXPECT_NE(message.find("LBFGS"), std::string::npos) << message;
    }
  });
}

}  // namespace
}  // namespace shardstep
