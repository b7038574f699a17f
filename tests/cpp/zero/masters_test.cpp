// Float32 masters of bfloat16 and float16 parameters, against the plain optimizer over a float32
// copy that is fed with the float32 sum of the ranks' gradients, its result rounded: equal bit for
// bit.

#include <gtest/gtest.h>

#include <optional>

#include "shardstep/shardstep.h"
#include "support/folder.h"
#include "support/full_run.h"
#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep {
namespace {

using MasterTensors = std::vector<at::Tensor>;

MasterTensors narrow_params(at::ScalarType dtype, uint64_t seed = 7) {
  MasterTensors params;
  for (const auto& param : test::make_params(seed)) {
    params.push_back(param.detach().to(dtype).requires_grad_());
  }
  return params;
}

// Parameters, their float32 copies, and the plain optimizer over these.
class MastersByHand {
 public:
  MastersByHand(at::ScalarType dtype, const LocalOptimizer& local, uint64_t seed = 7)
      : params_(narrow_params(dtype, seed)) {
    for (const auto& param : params_) {
      masters_.push_back(param.detach().to(at::kFloat).requires_grad_());
    }
    plain_ = local.make(test::one_group(masters_));
  }

  const MasterTensors& params() const { return params_; }
  const MasterTensors& masters() const { return masters_; }
  torch::optim::Optimizer& plain() { return *plain_; }

  void step(const MasterTensors& gradients) {
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < params_.size(); ++i) {
      masters_[i].mutable_grad() = gradients[i].defined()
                                       ? torch::empty_like(masters_[i]).copy_(gradients[i])
                                       : at::Tensor();
    }
    plain_->step();
    for (size_t i = 0; i < params_.size(); ++i) params_[i].detach().copy_(masters_[i]);
  }

 private:
  MasterTensors params_, masters_;
  std::unique_ptr<torch::optim::Optimizer> plain_;
};

MasterTensors gradients_in(const MasterTensors& params) {
  MasterTensors gradients;
  for (const auto& param : params) gradients.push_back(param.grad());
  return gradients;
}

// ---- stage 2 -----------------------------------------------------------------------------------

struct NarrowWay {
  ExchangeKind exchange = ExchangeKind::kPairwise;
  Sharding sharding = Sharding::kElement;
  double bucket_cap_mb = 0;
  bool flat = false;
  bool share_parameters = false;
  bool overlap_forward = false;
  at::ScalarType dtype = at::kBFloat16;
};

ZeroOptions options_for(const NarrowWay& way, const ProcessGroupPtr& group) {
  return ZeroOptions()
      .stage(2)
      .process_group(group)
      .exchange(way.exchange)
      .sharding(way.sharding)
      .bucket_cap_mb(way.bucket_cap_mb)
      .parameters_as_bucket_view(way.flat)
      .share_parameters(way.share_parameters)
      .overlap_forward(way.overlap_forward)
      .gradient_dtype(at::kHalf)  // has no effect on narrow parameters
      .master_dtype(at::kFloat);
}

// Element-wise, so that a gradient has the same bits wherever it is computed. Number 4 is unused,
// and number 1 on all ranks but the first.
at::Tensor narrow_loss(const MasterTensors& params, int rank, int pass) {
  const auto random = test::generator(1 + 100 * pass + rank);
  auto loss = torch::zeros({});
  for (size_t i = 0; i < params.size(); ++i) {
    const auto factor = torch::randn(params[i].sizes(), random).to(params[i].scalar_type());
    if (i == 4 || (i == 1 && rank > 0)) continue;
    loss = loss + (params[i] * factor).to(at::kFloat).square().sum();
  }
  return loss;
}

// The float32 average of the ranks' narrow gradients, in rank order.
MasterTensors average_gradients(const MasterTensors& params, int world_size, int pass) {
  MasterTensors sums(params.size());
  for (int rank = 0; rank < world_size; ++rank) {
    narrow_loss(params, rank, pass).backward();
    for (size_t i = 0; i < params.size(); ++i) {
      auto& gradient = at::Tensor(params[i]).mutable_grad();
      if (gradient.defined()) {
        const auto term = gradient.to(at::kFloat);
        sums[i] = sums[i].defined() ? sums[i] + term : term;
      }
      gradient.reset();
    }
  }
  for (auto& sum : sums) {
    if (sum.defined()) sum.div_(world_size);
  }
  return sums;
}

void expect_equals_masters_by_hand(int world_size, const NarrowWay& way) {
  SCOPED_TRACE(c10::str(static_cast<int>(way.exchange), " ", static_cast<int>(way.sharding), " ",
                        way.bucket_cap_mb, " ", way.flat, " ", way.share_parameters, " ",
                        way.overlap_forward, " ", way.dtype));
  test::run_ranks(world_size, [&](const ProcessGroupPtr& group) {
    const auto local = local_optimizer(torch::optim::AdamWOptions(1e-2));
    const auto params = narrow_params(way.dtype);
    ZeroRedundancyOptimizer zero(params, local, options_for(way, group));
    MastersByHand by_hand(way.dtype, local);
    for (int step = 0; step < 5; ++step) {
      zero.zero_grad();
      zero.wait();
      narrow_loss(params, group->getRank(), step).backward();
      zero.step();
      zero.wait();
      by_hand.step(average_gradients(by_hand.params(), world_size, step));
      test::expect_equal(params, by_hand.params(), c10::str("step ", step));
    }
  });
}

class MastersTest : public testing::TestWithParam<int> {};

TEST_P(MastersTest, Stage2EqualsMastersByHand) {
  std::vector<NarrowWay> ways;
  for (auto exchange : {ExchangeKind::kPairwise, ExchangeKind::kSharedMemory, ExchangeKind::kNative,
                        ExchangeKind::kHierarchical}) {
    for (auto sharding : {Sharding::kElement, Sharding::kParameter}) {
      for (double cap : {0.0, 3e-4}) {
        for (bool flat : {false, true}) {
          for (bool overlap_forward : {false, true}) {
            for (auto dtype : {at::kBFloat16, at::kHalf}) {
              ways.push_back({exchange, sharding, cap, flat, false, overlap_forward, dtype});
            }
          }
        }
      }
    }
  }
  for (const auto& way : test::sample(ways, 12)) expect_equals_masters_by_hand(GetParam(), way);
  for (auto sharding : {Sharding::kElement, Sharding::kParameter}) {
    expect_equals_masters_by_hand(
        GetParam(),
        {.exchange = ExchangeKind::kSharedMemory, .sharding = sharding, .share_parameters = true});
  }
}

// Clipped in float32: the norm is that of the float32 sums.
TEST_P(MastersTest, Stage2ClipsTheFloat32Sums) {
  const int world_size = GetParam();
  if (world_size == 1) return;  // `.grad` is whole there, and as narrow as the parameter
  for (auto sharding : {Sharding::kElement, Sharding::kParameter}) {
    test::run_ranks(world_size, [&](const ProcessGroupPtr& group) {
      const auto local = local_optimizer(torch::optim::SGDOptions(1e-2));
      const auto params = narrow_params(at::kBFloat16);
      ZeroRedundancyOptimizer zero(params, local, options_for({.sharding = sharding}, group));
      MastersByHand by_hand(at::kBFloat16, local);
      for (int step = 0; step < 3; ++step) {
        narrow_loss(params, group->getRank(), step).backward();
        const double norm = zero.clip_grad_norm_(0.1);
        zero.step();
        zero.zero_grad();
        auto gradients = average_gradients(by_hand.params(), world_size, step);
        double squares = 0;
        for (const auto& gradient : gradients) {
          if (gradient.defined()) squares += gradient.square().sum(at::kDouble).item<double>();
        }
        EXPECT_NEAR(norm, std::sqrt(squares), 1e-5 * norm);
        for (auto& gradient : gradients) {
          if (gradient.defined()) gradient.mul_(0.1 / (norm + 1e-6));
        }
        by_hand.step(gradients);
        test::expect_equal(params, by_hand.params(), c10::str("step ", step));
      }
    });
  }
}

// ---- stage 1 -----------------------------------------------------------------------------------

TEST_P(MastersTest, Stage1EqualsMastersByHandForEveryOptimizer) {
  for (auto sharding : {Sharding::kElement, Sharding::kParameter}) {
    for (bool flat : {false, true}) {
      for (const auto& local : test::sample(test::optimizers(), 2)) {
        SCOPED_TRACE(c10::str(local.name, " ", static_cast<int>(sharding), " ", flat));
        test::run_ranks(GetParam(), [&](const ProcessGroupPtr& group) {
          const auto params = narrow_params(at::kBFloat16);
          ZeroRedundancyOptimizer zero(params, local,
                                       ZeroOptions()
                                           .process_group(group)
                                           .sharding(sharding)
                                           .parameters_as_bucket_view(flat)
                                           .master_dtype(at::kFloat));
          MastersByHand by_hand(at::kBFloat16, local);
          for (int step = 0; step < 4; ++step) {
            test::set_gradients(params, step);
            by_hand.step(gradients_in(params));
            zero.step();
            test::expect_equal(params, by_hand.params(), c10::str("step ", step));
          }
        });
      }
    }
  }
}

// As the hooks of DistributedDataParallel do: some parameters at a time.
TEST_P(MastersTest, UpdatesInsideTheBackwardPassEqualMastersByHand) {
  for (auto sharding : {Sharding::kElement, Sharding::kParameter}) {
    test::run_ranks(GetParam(), [&](const ProcessGroupPtr& group) {
      const auto local = local_optimizer(torch::optim::AdamOptions(1e-2));
      const auto params = narrow_params(at::kHalf);
      ZeroRedundancyOptimizer zero(
          params, local,
          ZeroOptions().process_group(group).sharding(sharding).overlap_with_ddp(true).master_dtype(
              at::kFloat));
      MastersByHand by_hand(at::kHalf, local);
      for (int step = 0; step < 3; ++step) {
        const auto gradients = narrow_params(at::kHalf, 100 + step);
        for (size_t half : {1, 0}) {
          ParamsAndGradients some;
          for (size_t i = half; i < params.size(); i += 2) {
            some.emplace_back(params[i], gradients[i].detach());
          }
          zero.update(some, static_cast<int>(half));
        }
        zero.end_updates();
        zero.wait();
        MasterTensors plain;
        for (const auto& gradient : gradients) plain.push_back(gradient.detach());
        by_hand.step(plain);
        test::expect_equal(params, by_hand.params(), c10::str("step ", step));
      }
    });
  }
}

TEST_P(MastersTest, AddedGroupsAndParametersOfFullWidthTakePart) {
  test::run_ranks(GetParam(), [&](const ProcessGroupPtr& group) {
    const auto local = local_optimizer(torch::optim::SGDOptions(0.1).momentum(0.9));
    auto params = narrow_params(at::kBFloat16);
    ZeroRedundancyOptimizer zero(
        params, local,
        ZeroOptions().process_group(group).sharding(Sharding::kElement).master_dtype(at::kFloat));
    MastersByHand first(at::kBFloat16, local), second(at::kHalf, local, 8);
    MastersByHand wide(at::kFloat, local, 9);
    const auto halves = narrow_params(at::kHalf, 8), floats = narrow_params(at::kFloat, 9);
    zero.add_param_group(torch::optim::OptimizerParamGroup(halves));
    zero.add_param_group(torch::optim::OptimizerParamGroup(floats));
    for (int step = 0; step < 3; ++step) {
      for (const auto& some : {params, halves, floats}) test::set_gradients(some, step);
      first.step(gradients_in(params));
      second.step(gradients_in(halves));
      wide.step(gradients_in(floats));
      zero.step();
      test::expect_equal(params, first.params());
      test::expect_equal(halves, second.params());
      test::expect_equal(floats, wide.params());
    }
  });
}

// As load_state_dict() of a module after the optimizer was made.
TEST_P(MastersTest, AParameterThatIsChangedInPlaceTakesItsMasterAlong) {
  for (auto sharding : {Sharding::kElement, Sharding::kParameter}) {
    test::run_ranks(GetParam(), [&](const ProcessGroupPtr& group) {
      const auto local = local_optimizer(torch::optim::SGDOptions(1e-3));
      const auto params = narrow_params(at::kBFloat16);
      ZeroRedundancyOptimizer zero(
          params, local,
          ZeroOptions().process_group(group).sharding(sharding).master_dtype(at::kFloat));
      MastersByHand by_hand(at::kBFloat16, local);
      for (int step = 0; step < 6; ++step) {
        if (step == 3) {
          at::NoGradGuard no_grad;
          // Most elements stay, and their masters keep their bits.
          at::Tensor(params[0]).index({0}).fill_(0.75);
          at::Tensor(by_hand.params()[0]).index({0}).fill_(0.75);
          by_hand.masters()[0].detach().index({0}).fill_(0.75);
        }
        test::set_gradients(params, step);
        by_hand.step(gradients_in(params));
        zero.step();
        test::expect_equal(params, by_hand.params(), c10::str("step ", step));
      }
    });
  }
}

TEST(MastersOptionsTest, OnlyFloat32MastersExist) {
  test::run_ranks(2, [](const ProcessGroupPtr& group) {
    const auto message = test::error_of<c10::ValueError>([&] {
      ZeroRedundancyOptimizer zero(narrow_params(at::kHalf), torch::optim::SGDOptions(0.1),
                                   ZeroOptions().process_group(group).master_dtype(at::kBFloat16));
    });
    EXPECT_NE(message.find("expected master_dtype to be float32, got BFloat16"), std::string::npos)
        << message;
  });
}

// ---- state -------------------------------------------------------------------------------------

ZeroOptions with_masters(const ProcessGroupPtr& group, Sharding sharding, int stage = 1) {
  return ZeroOptions().process_group(group).sharding(sharding).stage(stage).master_dtype(
      at::kFloat);
}

// Gradients that are the same on every rank, so that both stages see the same average.
void step_with(const MasterTensors& params, ZeroRedundancyOptimizer& zero, int step) {
  const auto random = test::generator(500 + step);
  auto loss = torch::zeros({});
  for (const auto& param : params) {
    const auto factor = torch::randn(param.sizes(), random).to(param.scalar_type());
    loss = loss + (param * factor).to(at::kFloat).sum();
  }
  loss.backward();
  zero.step();
  zero.zero_grad();
}

struct TrainedMasters {
  MasterTensors params;
  StateDict state;
};

// After `steps` steps, on rank 0.
TrainedMasters train_masters(int world_size, Sharding sharding, int stage, int steps,
                             const std::string& checkpoint = "") {
  TrainedMasters result;
  test::run_ranks(world_size, [&](const ProcessGroupPtr& group) {
    const auto params = narrow_params(at::kBFloat16);
    ZeroRedundancyOptimizer zero(params, torch::optim::AdamWOptions(1e-2),
                                 with_masters(group, sharding, stage));
    for (int step = 0; step < steps; ++step) step_with(params, zero, step);
    if (!checkpoint.empty()) zero.save_checkpoint(checkpoint);
    const auto state = zero.consolidate_state_dict(0);
    if (group->getRank() == 0) result = {params, *state};
  });
  return result;
}

TEST(MastersStateTest, ReloadsAtAnyWorldSizeShardingAndStage) {
  const test::Folder folder;
  const auto saved = train_masters(2, Sharding::kElement, 2, 3, folder / "saved");
  const auto expected = train_masters(2, Sharding::kParameter, 1, 5);
  ASSERT_TRUE(saved.state.state.at(0).contains("master_param"));
  EXPECT_EQ(saved.state.state.at(0)["master_param"].toTensor().scalar_type(), at::kFloat);
  for (int world_size : {1, 2, 3}) {
    for (auto sharding : {Sharding::kElement, Sharding::kParameter}) {
      for (bool from_checkpoint : {false, true}) {
        const int stage = from_checkpoint ? 1 : 2;
        SCOPED_TRACE(c10::str(world_size, " ", static_cast<int>(sharding), " ", stage));
        test::run_ranks(world_size, [&](const ProcessGroupPtr& group) {
          auto params = narrow_params(at::kBFloat16, 99);
          ZeroRedundancyOptimizer zero(params, torch::optim::AdamWOptions(1e-2),
                                       with_masters(group, sharding, stage));
          from_checkpoint ? static_cast<void>(zero.load_checkpoint(folder / "saved"))
                          : zero.load_state_dict(saved.state);
          at::NoGradGuard no_grad;
          for (size_t i = 0; i < params.size(); ++i) params[i].copy_(saved.params[i]);
          at::AutoGradMode grad(true);
          for (int step = 3; step < 5; ++step) step_with(params, zero, step);
          test::expect_equal(params, expected.params);
          const auto state = zero.consolidate_state_dict(0);
          if (group->getRank() == 0) test::expect_equal(*state, expected.state);
        });
      }
    }
  }
}

// What the plain optimizer over the float32 masters would go on with.
TEST(MastersStateTest, GoesOnInFloat32WithoutThemAndTheOtherWayRound) {
  const test::Folder folder;
  const auto saved = train_masters(2, Sharding::kElement, 1, 3, folder / "narrow");
  for (bool from_checkpoint : {false, true}) {
    SCOPED_TRACE(from_checkpoint);
    test::run_ranks(2, [&](const ProcessGroupPtr& group) {
      MasterTensors params;
      for (const auto& param : saved.params) {
        params.push_back(param.detach().to(at::kFloat).requires_grad_());
      }
      ZeroRedundancyOptimizer zero(params, torch::optim::AdamWOptions(1e-2),
                                   ZeroOptions().process_group(group).sharding(Sharding::kElement));
      from_checkpoint ? static_cast<void>(zero.load_checkpoint(folder / "narrow"))
                      : zero.load_state_dict(saved.state);
      for (const auto& [index, values] : saved.state.state) {
        EXPECT_TRUE(at::equal(params[index], values["master_param"].toTensor())) << index;
      }
      step_with(params, zero, 3);
      const auto state = zero.consolidate_state_dict(0);
      if (group->getRank() == 0) EXPECT_FALSE(state->state.at(0).contains("master_param"));
    });
  }
  // A checkpoint of a float32 run has its parameters in full width.
  test::run_ranks(2, [&](const ProcessGroupPtr& group) {
    torch::nn::Linear wide(9, 5), narrow(9, 5);
    const auto fill = [](torch::nn::Linear& net, uint64_t seed) {
      at::NoGradGuard no_grad;
      for (auto& param : net->parameters()) param.normal_(0, 1, test::generator(seed));
    };
    fill(wide, 1);
    fill(narrow, 2);
    narrow->to(at::kBFloat16);
    ZeroRedundancyOptimizer before(wide->parameters(), torch::optim::AdamWOptions(1e-2),
                                   ZeroOptions().process_group(group).sharding(Sharding::kElement));
    step_with(wide->parameters(), before, 0);
    before.save_checkpoint(folder / "wide", CheckpointOptions().module(wide.ptr()));
    ZeroRedundancyOptimizer after(narrow->parameters(), torch::optim::AdamWOptions(1e-2),
                                  with_masters(group, Sharding::kParameter));
    after.load_checkpoint(folder / "wide", CheckpointOptions().module(narrow.ptr()));
    test::expect_equal(narrow->parameters(),
                       {wide->weight.to(at::kBFloat16), wide->bias.to(at::kBFloat16)});
    const auto state = after.consolidate_state_dict(0);
    if (group->getRank() != 0) return;
    EXPECT_TRUE(at::equal(state->state.at(0)["master_param"].toTensor(), wide->weight));
    EXPECT_EQ(state->state.at(0)["exp_avg"].toTensor().scalar_type(), at::kFloat);
  });
}

TEST(MastersStateTest, APlainOptimizersStateLoadsAndMastersStartFromTheParameters) {
  test::run_ranks(2, [&](const ProcessGroupPtr& group) {
    const auto local = local_optimizer(torch::optim::AdamOptions(1e-2));
    auto plain_params = narrow_params(at::kBFloat16);
    auto plain = local.make(test::one_group(plain_params));
    test::train(plain_params, *plain, 0, 3);
    const auto params = narrow_params(at::kBFloat16, 99);
    ZeroRedundancyOptimizer zero(params, local, with_masters(group, Sharding::kElement));
    zero.load_state_dict(test::plain_state_dict(local, *plain));
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < params.size(); ++i) at::Tensor(params[i]).copy_(plain_params[i]);
    MastersByHand by_hand(at::kBFloat16, local);
    for (size_t i = 0; i < params.size(); ++i) {
      by_hand.masters()[i].detach().copy_(params[i]);
      const auto found = plain->state().find(plain_params[i].unsafeGetTensorImpl());
      if (found == plain->state().end()) continue;
      auto values = local.read_state(*found->second);
      for (auto& item : values) {
        if (item.key() != "step") item.value() = item.value().toTensor().to(at::kFloat);
      }
      by_hand.plain().state()[by_hand.masters()[i].unsafeGetTensorImpl()] =
          local.write_state(values);
    }
    test::set_gradients(params, 4);
    by_hand.step(gradients_in(params));
    zero.step();
    test::expect_equal(params, by_hand.params());
  });
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, MastersTest, testing::Values(1, 2, 3));

}  // namespace
}  // namespace shardstep
