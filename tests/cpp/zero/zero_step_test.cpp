// step(): parity with the plain optimizer, groups, closures, schedulers, frozen parameters.

#include <gtest/gtest.h>

#include "shard/shard_engine.h"
#include "support/full_run.h"
#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep {
namespace {

using test::expect_equal;
using test::make_params;
using test::one_group;
using test::run_ranks;
using test::set_gradients;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;

struct StepWay {
  Sharding sharding;
  bool view;
  ExchangeKind exchange;
  double cap_mb = 0;
};

std::vector<StepWay> step_ways() {
  std::vector<StepWay> ways;
  for (auto exchange : test::exchanges({ExchangeKind::kPairwise, ExchangeKind::kNative})) {
    for (auto sharding : {Sharding::kParameter, Sharding::kElement}) {
      for (bool view : {false, true}) ways.push_back({sharding, view, exchange});
    }
  }
  const auto shared = test::exchanges({ExchangeKind::kSharedMemory}).front();
  ways.push_back({Sharding::kElement, false, shared});
  ways.push_back({Sharding::kElement, true, ExchangeKind::kAuto, 1e-6});
  ways.push_back({Sharding::kParameter, true, ExchangeKind::kAuto, 2e-4});
  return ways;
}

const auto kWays = step_ways();

ZeroOptions options(const StepWay& way, const ProcessGroupPtr& group) {
  return ZeroOptions()
      .process_group(group)
      .sharding(way.sharding)
      .parameters_as_bucket_view(way.view)
      .exchange(way.exchange)
      .bucket_cap_mb(way.cap_mb);
}

std::vector<LocalOptimizer> all_optimizers() {
  return {local_optimizer(torch::optim::AdamOptions(0.01).amsgrad(true)),
          local_optimizer(AdamWOptions(0.01)),
          local_optimizer(torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true)),
          local_optimizer(torch::optim::SGDOptions(0.1).weight_decay(0.1)),
          local_optimizer(torch::optim::AdagradOptions(0.1)),
          local_optimizer(torch::optim::RMSpropOptions(0.01).centered(true).momentum(0.5))};
}

class ZeroStepWorld : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(ZeroStep, ZeroStepWorld, testing::Values(1, 2, 3, 4, 9));

// The gradients are the same on every rank and every element is updated once, by the same kernel,
// so the bits are those of the plain optimizer.
TEST_P(ZeroStepWorld, EqualsThePlainOptimizerBitForBit) {
  const auto ways = GetParam() <= 2 ? kWays : test::sample(kWays, 3);
  run_ranks(GetParam(), [&](const ProcessGroupPtr& group) {
    for (const auto& way : ways) {
      for (const auto& local : all_optimizers()) {
        auto params = make_params(), plain_params = make_params();
        ZeroRedundancyOptimizer zero(params, local, options(way, group));
        auto plain = local.make(one_group(plain_params));
        for (int step = 0; step < 5; ++step) {
          set_gradients(params, step);
          set_gradients(plain_params, step);
          zero.step();
          plain->step();
          expect_equal(params, plain_params, local.name);
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  });
}

TEST_P(ZeroStepWorld, StateIsDivided) {
  run_ranks(GetParam(), [](const ProcessGroupPtr& group) {
    // Sharding by element is even whatever the model, also where one parameter is most of it.
    const auto random = test::generator(3);
    std::vector<at::Tensor> params{test::randn({1000, 90}, random).requires_grad_(),
                                   test::randn({13}, random).requires_grad_()};
    ZeroRedundancyOptimizer zero(params, AdamWOptions(0.01),
                                 ZeroOptions().process_group(group).sharding(Sharding::kElement));
    for (auto& param : params) param.mutable_grad() = torch::ones_like(param);
    zero.step();
    const int64_t share = 2 * 4 * 90013 / group->getSize();
    EXPECT_NEAR(zero.local_state_bytes(), share, 2 * 64 * group->getSize());
  });
}

TEST(ZeroStep, MovesEveryShardOnceToEveryOther) {
  SHARDSTEP_NEEDS_CPU("the pairwise exchange counts bytes");
  run_ranks(4, [](const ProcessGroupPtr& group) {
    std::vector<at::Tensor> params{test::zeros({640}).requires_grad_()};
    for (bool view : {false, true}) {
      ZeroRedundancyOptimizer zero(params, AdamWOptions(0.01),
                                   ZeroOptions()
                                       .process_group(group)
                                       .sharding(Sharding::kElement)
                                       .exchange(ExchangeKind::kPairwise)
                                       .parameters_as_bucket_view(view));
      params[0].mutable_grad() = test::ones({640});
      zero.step();
      const int64_t compared = 8, outcome = 256;  // for all parameters
      EXPECT_EQ(zero.engine().traffic().bytes_sent, 3 * (640 + compared + outcome));
      EXPECT_EQ(zero.engine().traffic().bytes_received, 3 * (640 + compared + outcome));
    }
  });
}

TEST(ZeroStep, GroupsUpFrontLaterOrThroughTheBaseAreTheSame) {
  for (auto sharding : {Sharding::kParameter, Sharding::kElement}) {
    run_ranks(3, [=](const ProcessGroupPtr& group) {
      const auto zero_options = ZeroOptions().process_group(group).sharding(sharding);
      const auto second = AdamWOptions(0.05).weight_decay(0.3);
      auto make_groups = [&](std::vector<at::Tensor>& params) {
        std::vector<OptimizerParamGroup> groups;
        groups.emplace_back(std::vector<at::Tensor>(params.begin(), params.begin() + 4));
        groups.emplace_back(std::vector<at::Tensor>(params.begin() + 4, params.end()),
                            std::make_unique<AdamWOptions>(second));
        return groups;
      };
      auto a = make_params(), b = make_params(), c = make_params(), d = make_params();
      ZeroRedundancyOptimizer up_front(make_groups(a), AdamWOptions(0.01), zero_options);
      ZeroRedundancyOptimizer later(one_group({b.begin(), b.begin() + 4}), AdamWOptions(0.01),
                                    zero_options);
      later.add_param_group(make_groups(b)[1]);
      ZeroRedundancyOptimizer through_base(one_group({c.begin(), c.begin() + 4}),
                                           AdamWOptions(0.01), zero_options);
      static_cast<torch::optim::Optimizer&>(through_base).add_param_group(make_groups(c)[1]);
      auto plain = local_optimizer(AdamWOptions(0.01)).make(make_groups(d));
      for (int step = 0; step < 4; ++step) {
        for (auto* params : {&a, &b, &c, &d}) set_gradients(*params, step);
        up_front.step();
        later.step();
        through_base.step();
        plain->step();
        expect_equal(a, d, "up front");
        expect_equal(b, d, "later");
        expect_equal(c, d, "through the base");
      }
    });
  }
}

TEST(ZeroStep, GroupsAddedBetweenStepsStartFresh) {
  for (auto local : all_optimizers()) {
    run_ranks(2, [&](const ProcessGroupPtr& group) {
      for (auto sharding : {Sharding::kParameter, Sharding::kElement}) {
        auto params = make_params(), plain_params = make_params();
        ZeroRedundancyOptimizer zero(one_group({params.begin(), params.begin() + 4}), local,
                                     ZeroOptions().process_group(group).sharding(sharding));
        auto plain = local.make(one_group(plain_params));
        auto first = local.make(one_group({plain_params.begin(), plain_params.begin() + 4}));
        auto second = local.make(one_group({plain_params.begin() + 4, plain_params.end()}));
        for (int step = 0; step < 4; ++step) {
          if (step == 2) {
            zero.add_param_group(OptimizerParamGroup({params.begin() + 4, params.end()}));
          }
          set_gradients(params, step);
          set_gradients(plain_params, step);
          zero.step();
          first->step();
          if (step >= 2) second->step();
          expect_equal(params, plain_params, local.name);
        }
      }
    });
  }
}

TEST(ZeroStep, ClosureIsEvaluatedAndItsLossReturned) {
  for (auto sharding : {Sharding::kParameter, Sharding::kElement}) {
    run_ranks(2, [=](const ProcessGroupPtr& group) {
      auto params = make_params(), plain_params = make_params();
      const auto local = local_optimizer(AdamWOptions(0.01));
      ZeroRedundancyOptimizer zero(params, local,
                                   ZeroOptions().process_group(group).sharding(sharding));
      auto plain = local.make(one_group(plain_params));
      auto closure = [](std::vector<at::Tensor>& all, torch::optim::Optimizer& optimizer) {
        return [&] {
          EXPECT_TRUE(at::GradMode::is_enabled());
          optimizer.zero_grad();
          auto loss = test::zeros({});
          for (auto& param : all) loss = loss + (param * param).sum();
          loss.backward();
          return loss;
        };
      };
      for (int step = 0; step < 3; ++step) {
        const auto loss = zero.step(closure(params, zero));
        const auto expected = plain->step(closure(plain_params, *plain));
        EXPECT_TRUE(at::equal(loss, expected));
        expect_equal(params, plain_params);
      }
    });
  }
}

TEST(ZeroStep, SchedulersReachTheLocalOptimizer) {
  for (auto sharding : {Sharding::kParameter, Sharding::kElement}) {
    run_ranks(2, [=](const ProcessGroupPtr& group) {
      auto params = make_params(), plain_params = make_params();
      const auto local = local_optimizer(AdamWOptions(0.1));
      ZeroRedundancyOptimizer zero(params, local,
                                   ZeroOptions().process_group(group).sharding(sharding));
      auto plain = local.make(one_group(plain_params));
      torch::optim::StepLR schedule(zero, 2, 0.5), plain_schedule(*plain, 2, 0.5);
      torch::optim::ReduceLROnPlateauScheduler plateau(
          zero, torch::optim::ReduceLROnPlateauScheduler::min, 0.1f, 1),
          plain_plateau(*plain, torch::optim::ReduceLROnPlateauScheduler::min, 0.1f, 1);
      const auto& held = zero.param_groups()[0].options();
      for (int step = 0; step < 7; ++step) {
        set_gradients(params, step);
        set_gradients(plain_params, step);
        zero.step();
        plain->step();
        schedule.step();
        plain_schedule.step();
        plateau.step(1.0f);
        plain_plateau.step(1.0f);
        expect_equal(params, plain_params);
        // References that users hold stay good.
        EXPECT_EQ(&held, &zero.param_groups()[0].options());
        EXPECT_EQ(held.get_lr(), plain->param_groups()[0].options().get_lr());
      }
      EXPECT_LT(held.get_lr(), 0.01);
    });
  }
}

TEST(ZeroStep, ZeroGradFreesTheGradients) {
  for (auto sharding : {Sharding::kParameter, Sharding::kElement}) {
    run_ranks(2, [=](const ProcessGroupPtr& group) {
      auto params = make_params();
      ZeroRedundancyOptimizer zero(params, AdamWOptions(0.01),
                                   ZeroOptions().process_group(group).sharding(sharding));
      set_gradients(params, 0);
      const auto gradient = params[0].grad();
      zero.step();
      zero.zero_grad();
      for (const auto& param : params) EXPECT_FALSE(param.grad().defined());
      EXPECT_EQ(gradient.storage().use_count(), 1) << "something still holds the gradient";
    });
  }
}

TEST(ZeroStep, FrozenAndUnfrozenParametersEqualThePlainOptimizer) {
  for (const auto& way : kWays) {
    run_ranks(2, [&](const ProcessGroupPtr& group) {
      auto params = make_params(), plain_params = make_params();
      params[0].set_requires_grad(false);
      const auto local = local_optimizer(AdamWOptions(0.01));
      ZeroRedundancyOptimizer zero(params, local, options(way, group));
      auto plain = local.make(one_group(plain_params));
      for (int step = 0; step < 6; ++step) {
        if (step == 2) params[0].set_requires_grad(true);
        if (step == 4) params[6].set_requires_grad(false);
        set_gradients(params, step);
        set_gradients(plain_params, step);
        for (size_t i = 0; i < params.size(); ++i) {
          if (params[i].requires_grad()) continue;
          params[i].mutable_grad().reset();
          plain_params[i].mutable_grad().reset();
        }
        zero.step();
        plain->step();
        expect_equal(params, plain_params);
      }
      // A gradient is a gradient, also of a frozen parameter.
      params[6].mutable_grad() = torch::ones_like(params[6]);
      plain_params[6].mutable_grad() = torch::ones_like(params[6]);
      zero.step();
      plain->step();
      expect_equal(params, plain_params);
    });
  }
}

TEST(ZeroStep, FreezingWarnsAndDoesNotTravel) {
  run_ranks(1, [](const ProcessGroupPtr& group) {
    struct Recorder : c10::WarningHandler {
      void process(const c10::Warning& warning) override { messages.push_back(warning.msg()); }
      std::vector<std::string> messages;
    } recorder;
    auto params = make_params();
    ZeroRedundancyOptimizer zero(params, AdamWOptions(0.01), ZeroOptions().process_group(group));
    c10::WarningUtils::WarningHandlerGuard guard(&recorder);
    zero.step();
    EXPECT_TRUE(recorder.messages.empty());
    params[0].set_requires_grad(false);
    zero.step();
    ASSERT_EQ(recorder.messages.size(), 1u);
    EXPECT_NE(recorder.messages[0].find("requires_grad"), std::string::npos);
  });
  SHARDSTEP_NEEDS_CPU("the pairwise exchange counts bytes");
  run_ranks(2, [](const ProcessGroupPtr& group) {
    std::vector<at::Tensor> params{test::zeros({100}), test::zeros({32}).requires_grad_()};
    for (bool view : {false, true}) {
      ZeroRedundancyOptimizer zero(params, AdamWOptions(0.01),
                                   ZeroOptions()
                                       .process_group(group)
                                       .sharding(Sharding::kElement)
                                       .exchange(ExchangeKind::kPairwise)
                                       .parameters_as_bucket_view(view));
      params[1].mutable_grad() = test::ones({32});
      zero.step();
      EXPECT_EQ(zero.engine().traffic().bytes_sent,
                64 + 8 + 256);  // a number to compare, and the outcome
    }
  });
}

TEST(ZeroStep, BucketViewLooksTheSameToEveryoneElse) {
  for (auto sharding : {Sharding::kParameter, Sharding::kElement}) {
    run_ranks(2, [=](const ProcessGroupPtr& group) {
      auto params = make_params(), plain_params = make_params();
      const auto local = local_optimizer(AdamWOptions(0.01));
      ZeroRedundancyOptimizer zero(
          params, local,
          ZeroOptions().process_group(group).sharding(sharding).parameters_as_bucket_view(true));
      EXPECT_TRUE(zero.parameters_as_bucket_view());
      auto plain = local.make(one_group(plain_params));
      EXPECT_TRUE(params[0].storage().is_alias_of(params[7].storage()));
      for (int step = 0; step < 4; ++step) {
        // Someone else gives a parameter other memory, or writes into it.
        if (step == 1) params[0].set_data(params[0].detach().clone());
        if (step == 2) {
          at::NoGradGuard no_grad;
          params[6].mul_(0.5);
          plain_params[6].mul_(0.5);
        }
        set_gradients(params, step);
        set_gradients(plain_params, step);
        zero.step();
        plain->step();
        expect_equal(params, plain_params);
      }
    });
  }
}

TEST(ZeroStep, MovedParametersAreFollowedWithoutBucketView) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    auto params = make_params(), plain_params = make_params();
    const auto local = local_optimizer(AdamWOptions(0.01));
    ZeroRedundancyOptimizer zero(params, local,
                                 ZeroOptions().process_group(group).sharding(Sharding::kElement));
    auto plain = local.make(one_group(plain_params));
    for (int step = 0; step < 4; ++step) {
      for (auto& param : params) param.set_data(param.detach().clone());
      set_gradients(params, step);
      set_gradients(plain_params, step);
      zero.step();
      plain->step();
      expect_equal(params, plain_params);
    }
  });
}

TEST(ZeroStep, MixedDtypesShardByElement) {
  run_ranks(3, [](const ProcessGroupPtr& group) {
    auto make = [] {
      auto params = make_params();
      params[0] = params[0].detach().to(at::kDouble).requires_grad_();
      params[7] = params[7].detach().to(at::kDouble).requires_grad_();
      return params;
    };
    for (bool view : {false, true}) {
      auto params = make(), plain_params = make();
      const auto local = local_optimizer(AdamWOptions(0.01));
      ZeroRedundancyOptimizer zero(params, local,
                                   ZeroOptions()
                                       .process_group(group)
                                       .sharding(Sharding::kElement)
                                       .parameters_as_bucket_view(view));
      auto plain = local.make(one_group(plain_params));
      test::expect_same_steps(zero, params, *plain, plain_params, 4);
    }
  });
}

TEST(ZeroStep, SubGroupsAreIndependent) {
  SHARDSTEP_NEEDS_CPU("new_group knows gloo and nccl");
  run_ranks(4, [](const ProcessGroupPtr& world) {
    // Ranks that are neither contiguous nor from 0 on, in an order of their own.
    const auto group = new_group({3, 1}, ProcessGroupOptions().backend("gloo"), world);
    if (!group) return;
    auto params = make_params(), plain_params = make_params();
    const auto local = local_optimizer(AdamWOptions(0.01));
    ZeroRedundancyOptimizer zero(params, local,
                                 ZeroOptions().process_group(group).sharding(Sharding::kElement));
    EXPECT_EQ(zero.world_size(), 2);
    EXPECT_EQ(zero.rank(), world->getRank() == 3 ? 0 : 1);
    EXPECT_EQ(zero.global_rank(), world->getRank());
    auto plain = local.make(one_group(plain_params));
    test::expect_same_steps(zero, params, *plain, plain_params, 3);
    const auto dict = zero.consolidate_state_dict(1);
    EXPECT_EQ(dict.has_value(), zero.rank() == 1);
  });
}

TEST(ZeroStep, OptimizersThatShareAGroupKeepTheirMessagesApart) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    auto a = make_params(1), b = make_params(2), plain_a = make_params(1), plain_b = make_params(2);
    const auto local = local_optimizer(AdamWOptions(0.01));
    const auto zero_options = ZeroOptions().process_group(group);
    ZeroRedundancyOptimizer zero_a(a, local, zero_options), zero_b(b, local, zero_options);
    auto one = local.make(one_group(plain_a)), two = local.make(one_group(plain_b));
    for (int step = 0; step < 3; ++step) {
      for (auto* params : {&a, &b, &plain_a, &plain_b}) set_gradients(*params, step);
      zero_a.step();
      zero_b.step();
      one->step();
      two->step();
      expect_equal(a, plain_a);
      expect_equal(b, plain_b);
    }
  });
}

}  // namespace
}  // namespace shardstep
