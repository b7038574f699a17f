// GradScaler against what Python's torch.amp.GradScaler does.

#include <gtest/gtest.h>

#include <limits>

#include "shardstep/shardstep.h"
#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep {
namespace {

constexpr double kHuge = std::numeric_limits<double>::infinity();

at::Tensor scaled_loss(const std::vector<at::Tensor>& params, int step, double factor) {
  const auto random = test::generator(40 + step);
  auto loss = torch::zeros({});
  for (const auto& param : params) {
    const auto weight = torch::randn(param.sizes(), random).to(param.scalar_type());
    loss = loss + (param * weight).to(at::kFloat).sum() * factor;
  }
  return loss;
}

// Powers of two change no bits: a scaled run equals one without a scaler. On one rank alone the
// gradients of step 2 are infinite, in stage 2; in stage 1 they are the same everywhere.
TEST(GradScaler, SkipsOnEveryRankAndChangesNoBits) {
  for (int stage : {1, 2}) {
    for (int world_size : {1, 2}) {
      for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
        SCOPED_TRACE(c10::str(stage, " ", world_size, " ", dtype));
        test::run_ranks(world_size, [&](const ProcessGroupPtr& group) {
          const auto make = [&] {
            std::vector<at::Tensor> params;
            for (const auto& param : test::make_params()) {
              params.push_back(param.detach().to(dtype).requires_grad_());
            }
            return params;
          };
          auto options = ZeroOptions().process_group(group).stage(stage);
          if (dtype != at::kFloat) options.master_dtype(at::kFloat);
          const auto params = make(), plain_params = make();
          const torch::optim::SGDOptions sgd(0.125);
          ZeroRedundancyOptimizer zero(params, sgd, options), plain(plain_params, sgd, options);
          GradScaler scaler(GradScalerOptions().init_scale(1024).growth_interval(3));
          for (int step = 0; step < 7; ++step) {
            const bool overflows = step == 2;
            const bool here = stage == 1 || group->getRank() == world_size - 1;
            zero.zero_grad();
            scaler.scale(scaled_loss(params, step, overflows && here ? kHuge : 1)).backward();
            if (step % 2 == 1) scaler.unscale_(zero);
            EXPECT_EQ(scaler.step(zero), !overflows) << step;
            scaler.update();
            if (overflows) continue;
            plain.zero_grad();
            scaled_loss(plain_params, step, 1).backward();
            plain.step();
            test::expect_equal(params, plain_params, c10::str("step ", step));
          }
          EXPECT_EQ(scaler.get_scale(), 1024);  // once halved, once doubled
        });
      }
    }
  }
}

TEST(GradScaler, IsRefusedWhereTheUpdateIsInsideTheBackwardPass) {
  test::run_ranks(1, [&](const ProcessGroupPtr& group) {
    ZeroRedundancyOptimizer zero(test::make_params(), torch::optim::SGDOptions(0.125),
                                 ZeroOptions().process_group(group).overlap_with_ddp(true));
    GradScaler scaler;
    const auto message = test::error_of<c10::ValueError>([&] { scaler.step(zero); });
    EXPECT_NE(message.find("got one with overlap_with_ddp"), std::string::npos) << message;
  });
}

// Float16 parameters with masters: from 2^15 on, gradients of the last rank alone have no room in
// float16. Steps are skipped on every rank until the scale fits; then the scale changes no bits.
TEST(GradScaler, FindsTheScaleOfFloat16Gradients) {
  for (int stage : {1, 2}) {
    for (auto sharding : {Sharding::kElement, Sharding::kParameter}) {
      SCOPED_TRACE(c10::str(stage, " ", static_cast<int>(sharding)));
      test::run_ranks(2, [&](const ProcessGroupPtr& group) {
        const auto make = [] {
          return std::vector<at::Tensor>{torch::ones({6}, at::kHalf).requires_grad_(),
                                         torch::ones({3, 5}, at::kHalf).requires_grad_()};
        };
        const auto options =
            ZeroOptions().process_group(group).stage(stage).sharding(sharding).master_dtype(
                at::kFloat);
        const auto params = make(), plain_params = make();
        const torch::optim::AdamWOptions adamw(0.125);
        ZeroRedundancyOptimizer zero(params, adamw, options), plain(plain_params, adamw, options);
        GradScaler scaler(GradScalerOptions().init_scale(1 << 17));
        // In stage 1 gradients are averaged before they arrive, so they are the same everywhere.
        const double factor = stage == 1 || group->getRank() == 1 ? 2 : 0.0078125;
        const auto loss_of = [&](const std::vector<at::Tensor>& over) {
          return (over[0].to(at::kFloat).sum() + over[1].to(at::kFloat).sum() * 0.5) * factor;
        };
        for (int step = 0; step < 6; ++step) {
          zero.zero_grad();
          scaler.scale(loss_of(params)).backward();
          const bool fits = step >= 3;  // at 2^17, 2^16 and 2^15 it overflows
          EXPECT_EQ(scaler.step(zero), fits) << step;
          scaler.update();
          if (fits) {
            plain.zero_grad();
            loss_of(plain_params).backward();
            plain.step();
          }
          test::expect_equal(params, plain_params, c10::str("step ", step));
        }
        EXPECT_EQ(scaler.get_scale(), 1 << 14);
      });
    }
  }
}

TEST(GradScaler, HasPythonsStateAndRefusesWrongOrders) {
  GradScaler scaler(GradScalerOptions().init_scale(8));
  EXPECT_EQ(scaler.state_dict().keys(),
            (std::vector<std::string>{"scale", "growth_factor", "backoff_factor", "growth_interval",
                                      "_growth_tracker"}));
  scaler.update(32.0);
  GradScaler again;
  again.load_state_dict(scaler.state_dict());
  EXPECT_EQ(again.get_scale(), 32);
  EXPECT_THROW(again.load_state_dict(NamedValues{}), c10::ValueError);
  EXPECT_THROW(again.update(), c10::Error);
  EXPECT_THROW(GradScaler(GradScalerOptions().growth_factor(1)), c10::ValueError);
  EXPECT_TRUE(GradScaler(GradScalerOptions().enabled(false)).state_dict().is_empty());
  test::run_ranks(1, [&](const ProcessGroupPtr& group) {
    const auto params = test::make_params();
    ZeroRedundancyOptimizer zero(params, torch::optim::SGDOptions(0.1),
                                 ZeroOptions().process_group(group));
    scaler.scale(scaled_loss(params, 0, 1)).backward();
    scaler.unscale_(zero);
    EXPECT_THROW(scaler.unscale_(zero), c10::Error);
    scaler.step(zero);
    EXPECT_THROW(scaler.step(zero), c10::Error);
  });
}

}  // namespace
}  // namespace shardstep
