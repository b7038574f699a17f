// Stochastic rounding of bfloat16 parameters that have no masters: computed as the plain optimizer
// computes in float32, then rounded up or down at random. Ranks are threads here and share torch's
// generator, so what several of them do with one seed is tested in Python.

#include <gtest/gtest.h>

#include "shardstep/shardstep.h"
#include "support/folder.h"
#include "support/full_run.h"
#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep {
namespace {

using RoundedTensors = std::vector<at::Tensor>;

RoundedTensors bfloat16_params(uint64_t seed = 7) {
  RoundedTensors params;
  for (const auto& param : test::make_params(seed)) {
    params.push_back(param.detach().to(at::kBFloat16).requires_grad_());
  }
  return params;
}

ZeroOptions rounds(const ProcessGroupPtr& group) {
  return ZeroOptions().process_group(group).rounding(Rounding::kStochastic);
}

// The same on every rank; exact in bfloat16, and so are sums of few ranks, divided.
void backward_of(const RoundedTensors& params, int step) {
  const auto random = test::generator(70 + step);
  auto loss = torch::zeros({});
  for (size_t i = 0; i < params.size(); ++i) {
    const auto factor = torch::randn(params[i].sizes(), random).to(at::kBFloat16);
    if ((step + i) % 4 != 3) loss = loss + (params[i] * factor).to(at::kFloat).sum();
  }
  loss.backward();
}

// Whether each element is one of the two bfloat16 neighbours of the float32 value, or the value.
void expect_neighbours(const RoundedTensors& got, const RoundedTensors& wide) {
  for (size_t i = 0; i < got.size(); ++i) {
    const auto bits = wide[i].detach().contiguous().view(at::kInt);
    const auto low = bits.bitwise_and(static_cast<int32_t>(0xffff0000));
    const auto high = at::where(bits.eq(low), low, low + 0x10000);
    const auto ours = got[i].detach().to(at::kFloat).contiguous().view(at::kInt);
    EXPECT_TRUE(ours.eq(low).logical_or(ours.eq(high)).all().item<bool>()) << "parameter " << i;
  }
}

struct RoundingWay {
  int stage = 1;
  Sharding sharding = Sharding::kElement;
  ExchangeKind exchange = ExchangeKind::kAuto;
  bool flat = false;
  bool share_parameters = false;
  bool overlap_forward = false;
};

void expect_rounds_float32_updates(int world_size, const RoundingWay& way) {
  SCOPED_TRACE(c10::str(way.stage, " ", static_cast<int>(way.sharding), " ",
                        static_cast<int>(way.exchange), " ", way.flat, " ", way.share_parameters,
                        " ", way.overlap_forward));
  test::run_ranks(world_size, [&](const ProcessGroupPtr& group) {
    const auto local = local_optimizer(torch::optim::AdamWOptions(1e-2));
    const auto params = bfloat16_params();
    ZeroRedundancyOptimizer zero(params, local,
                                 rounds(group)
                                     .stage(way.stage)
                                     .sharding(way.sharding)
                                     .exchange(way.exchange)
                                     .parameters_as_bucket_view(way.flat)
                                     .share_parameters(way.share_parameters)
                                     .overlap_forward(way.overlap_forward));
    RoundedTensors wide, plain_params = bfloat16_params();
    for (const auto& param : params) {
      wide.push_back(param.detach().to(at::kFloat).clone().requires_grad_());
    }
    const auto plain = local.make(test::one_group(wide));
    for (int step = 0; step < 4; ++step) {
      for (size_t i = 0; i < params.size(); ++i) {
        at::NoGradGuard no_grad;
        wide[i].copy_(params[i]);
        plain_params[i].mutable_grad().reset();
      }
      backward_of(plain_params, step);
      for (size_t i = 0; i < params.size(); ++i) {
        const auto& gradient = plain_params[i].grad();
        wide[i].mutable_grad() =
            gradient.defined() ? torch::empty_like(wide[i]).copy_(gradient) : at::Tensor();
      }
      plain->step();
      zero.zero_grad();
      zero.wait();
      backward_of(params, step);
      zero.step();
      zero.wait();
      expect_neighbours(params, wide);
    }
    const auto state = zero.consolidate_state_dict(0);
    if (group->getRank() != 0) return;
    const auto& values = state->state.at(0);
    EXPECT_EQ(values["exp_avg"].toTensor().scalar_type(), at::kFloat);
    EXPECT_FALSE(values.contains("master_param"));
  });
}

TEST(Rounding, RoundsTheFloat32UpdateInEveryWay) {
  std::vector<RoundingWay> ways;
  for (auto sharding : {Sharding::kElement, Sharding::kParameter}) {
    for (bool flat : {false, true}) {
      for (int stage : {1, 2}) {
        for (auto exchange : {ExchangeKind::kPairwise, ExchangeKind::kSharedMemory,
                              ExchangeKind::kNative, ExchangeKind::kHierarchical}) {
          ways.push_back({stage, sharding, exchange, flat});
        }
      }
    }
    ways.push_back({.stage = 2, .sharding = sharding, .overlap_forward = true});
    ways.push_back({.stage = 2,
                    .sharding = sharding,
                    .exchange = ExchangeKind::kSharedMemory,
                    .share_parameters = true});
  }
  for (int world_size : {1, 2, 3}) {
    for (const auto& way : test::sample(ways, 6)) expect_rounds_float32_updates(world_size, way);
  }
}

// A step of 2e-4 below 1, where the neighbours of 1 are 2^-8 away.
TEST(Rounding, SmallUpdatesAreNotLostOnAverage) {
  for (const bool stochastic : {false, true}) {
    test::run_ranks(2, [&](const ProcessGroupPtr& group) {
      const auto param = torch::ones({8000}, at::kBFloat16).requires_grad_();
      auto options = ZeroOptions().process_group(group).sharding(Sharding::kElement);
      if (stochastic) options.rounding(Rounding::kStochastic);
      ZeroRedundancyOptimizer zero({param}, torch::optim::SGDOptions(2e-4), options);
      for (int step = 0; step < 100; ++step) {
        at::Tensor(param).mutable_grad() = torch::ones_like(param);
        zero.step();
      }
      const double mean = param.detach().mean(at::kDouble).item<double>();
      if (stochastic) {
        EXPECT_NEAR(mean, 0.98, 1e-3);
      } else {
        EXPECT_EQ(mean, 1);
      }
    });
  }
}

TEST(Rounding, AResumedRunIsTheUninterruptedOneBitForBit) {
  const test::Folder folder;
  RoundedTensors saved, expected;
  const auto train = [](const RoundedTensors& params, ZeroRedundancyOptimizer& zero, int from) {
    for (int step = from; step < from + 3; ++step) {
      backward_of(params, step);
      zero.step();
      zero.zero_grad();
    }
  };
  test::run_ranks(1, [&](const ProcessGroupPtr& group) {
    const auto params = bfloat16_params();
    ZeroRedundancyOptimizer zero(params, torch::optim::AdamWOptions(1e-2), rounds(group));
    train(params, zero, 0);
    zero.save_checkpoint(folder / "saved");
    for (const auto& param : params) saved.push_back(param.detach().clone());
    train(params, zero, 3);
    expected = params;
  });
  torch::manual_seed(99);
  test::run_ranks(1, [&](const ProcessGroupPtr& group) {
    RoundedTensors params;
    for (const auto& param : saved) params.push_back(param.clone().requires_grad_());
    ZeroRedundancyOptimizer zero(params, torch::optim::AdamWOptions(1e-2), rounds(group));
    zero.load_checkpoint(folder / "saved");
    train(params, zero, 3);
    test::expect_equal(params, expected);
  });
}

TEST(Rounding, IsRefusedForOtherDtypesAndWithMasters) {
  test::run_ranks(2, [](const ProcessGroupPtr& group) {
    const auto refusal = [&](at::ScalarType dtype, const ZeroOptions& options) {
      const RoundedTensors params{torch::ones({3}, dtype).requires_grad_()};
      return test::error_of<c10::ValueError>(
          [&] { ZeroRedundancyOptimizer zero(params, torch::optim::SGDOptions(0.1), options); });
    };
    const auto expect = [](const std::string& message, const char* part) {
      EXPECT_NE(message.find(part), std::string::npos) << message;
    };
    expect(refusal(at::kHalf, rounds(group)),
           "expected bfloat16 parameters with stochastic rounding, got parameter 0 of Half");
    expect(refusal(at::kFloat, rounds(group)), "with stochastic rounding, got only Float");
    expect(refusal(at::kBFloat16, rounds(group).master_dtype(at::kFloat)),
           "expected master_dtype or stochastic rounding, got both");
  });
}

}  // namespace
}  // namespace shardstep
