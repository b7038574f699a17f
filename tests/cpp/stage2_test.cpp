// Stage 2 against a reference that adds up the ranks' gradients in rank order and runs the same
// optimizer unsharded: equal to the bit.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <random>
#include <thread>

#include "shardstep/shardstep.h"
#include "zero_support.h"

namespace shardstep {
namespace {

using Tensors = std::vector<at::Tensor>;

struct Way {
  ExchangeKind exchange = ExchangeKind::kPairwise;
  Sharding sharding = Sharding::kElement;
  double bucket_cap_mb = 0;
  bool flat = false;
};

ZeroOptions options_of(const Way& way, const ProcessGroupPtr& group) {
  return ZeroOptions()
      .stage(2)
      .process_group(group)
      .exchange(way.exchange)
      .sharding(way.sharding)
      .bucket_cap_mb(way.bucket_cap_mb)
      .parameters_as_bucket_view(way.flat);
}

std::string name_of(const Way& way) {
  return c10::str(static_cast<int>(way.exchange), " ", static_cast<int>(way.sharding), " ",
                  way.bucket_cap_mb, " ", way.flat);
}

std::vector<Way> all_ways() {
  std::vector<Way> ways;
  for (auto exchange :
       {ExchangeKind::kPairwise, ExchangeKind::kSharedMemory, ExchangeKind::kNative}) {
    for (auto sharding : {Sharding::kElement, Sharding::kParameter}) {
      for (double cap : {0.0, 1e-6, 3e-4}) {
        for (bool flat : {false, true}) ways.push_back({exchange, sharding, cap, flat});
      }
    }
  }
  return ways;
}

// Which parameters a rank uses in a pass. Number 4 nobody ever does, number 1 only rank 0.
bool uses(int rank, int pass, size_t param) {
  if (param == 4) return false;
  if (param == 1) return rank == 0;
  return (pass + rank + static_cast<int>(param)) % 5 != 0;
}

// Element-wise, so that a gradient is the same to the bit wherever it is computed.
at::Tensor loss_of(const Tensors& params, int rank, int pass) {
  const auto random = test::generator(1 + 100 * pass + rank);
  auto loss = torch::zeros({});
  for (size_t i = 0; i < params.size(); ++i) {
    const auto factor = torch::randn(params[i].sizes(), random);
    if (uses(rank, pass, i)) loss = loss + (params[i] * factor).square().sum();
  }
  return loss;
}

// The gradients of one rank for some passes, added up as autograd does.
Tensors gradients_of(const Tensors& params, int rank, const std::vector<int>& passes) {
  for (const auto& param : params) at::Tensor(param).mutable_grad().reset();
  for (int pass : passes) {
    const auto loss = loss_of(params, rank, pass);
    if (loss.requires_grad()) loss.backward();
  }
  Tensors gradients;
  for (const auto& param : params) {
    gradients.push_back(param.grad());
    at::Tensor(param).mutable_grad().reset();
  }
  return gradients;
}

// Adds the average over the ranks to `.grad`, in rank order.
void add_average(const Tensors& params, int world_size, const std::vector<int>& passes,
                 Tensors& sums) {
  std::vector<Tensors> given;
  for (int rank = 0; rank < world_size; ++rank) {
    given.push_back(gradients_of(params, rank, passes));
  }
  for (size_t i = 0; i < params.size(); ++i) {
    at::Tensor sum;
    bool used = false;
    for (int rank = 0; rank < world_size; ++rank) {
      used = used || given[rank][i].defined();
      const auto term =
          given[rank][i].defined() ? given[rank][i] : torch::zeros_like(params[i]).detach();
      sum = sum.defined() ? sum + term : term.clone();
    }
    if (!used) continue;
    sum.div_(world_size);
    sums[i] = sums[i].defined() ? sums[i] + sum : sum;
  }
}

void set_all(const Tensors& params, const Tensors& gradients) {
  for (size_t i = 0; i < params.size(); ++i) {
    at::Tensor(params[i]).mutable_grad() = gradients[i];
  }
}

class Stage2Test : public testing::TestWithParam<int> {};

TEST_P(Stage2Test, EqualsTheSumInRankOrderAndThePlainOptimizer) {
  const int world_size = GetParam();
  for (const auto& way : all_ways()) {
    if (way.exchange == ExchangeKind::kNative && world_size > 2) continue;  // sums in any order
    SCOPED_TRACE(name_of(way));
    test::run_ranks(world_size, [&](const ProcessGroupPtr& group) {
      const int rank = group->getRank();
      const auto params = test::make_params(7);
      const auto plain_params = test::make_params(7);
      ZeroRedundancyOptimizer zero(params, torch::optim::AdamWOptions(1e-2),
                                   options_of(way, group));
      optim::AdamW plain(plain_params, torch::optim::AdamWOptions(1e-2));
      for (int step = 0; step < 6; ++step) {
        zero.zero_grad();
        loss_of(params, rank, step).backward();
        for (const auto& param : params) {
          if (world_size > 1) EXPECT_FALSE(param.grad().defined());
        }
        zero.step();
        Tensors sums(params.size());
        add_average(plain_params, world_size, {step}, sums);
        set_all(plain_params, sums);
        plain.step();
        test::expect_equal(params, plain_params, c10::str("step ", step));
      }
    });
  }
}

TEST_P(Stage2Test, BackwardPassesAddUp) {
  const int world_size = GetParam();
  for (const auto& way : all_ways()) {
    if (way.exchange == ExchangeKind::kNative || way.flat) continue;
    SCOPED_TRACE(name_of(way));
    test::run_ranks(world_size, [&](const ProcessGroupPtr& group) {
      const int rank = group->getRank();
      const auto params = test::make_params(7);
      const auto plain_params = test::make_params(7);
      ZeroRedundancyOptimizer zero(params, torch::optim::AdamOptions(1e-2), options_of(way, group));
      optim::Adam plain(plain_params, torch::optim::AdamOptions(1e-2));
      for (int step = 0; step < 3; ++step) {
        const int pass = 10 * step;
        {
          const auto guard = zero.no_sync();
          loss_of(params, rank, pass).backward();
        }
        loss_of(params, rank, pass + 1).backward();  // takes the first along
        loss_of(params, rank, pass + 2).backward();
        zero.step();
        Tensors sums(params.size());
        if (world_size > 1) {
          add_average(plain_params, world_size, {pass, pass + 1}, sums);
          add_average(plain_params, world_size, {pass + 2}, sums);
        } else {
          add_average(plain_params, world_size, {pass, pass + 1, pass + 2}, sums);
        }
        set_all(plain_params, sums);
        plain.step();
        test::expect_equal(params, plain_params, c10::str("step ", step));
      }
    });
  }
}

TEST_P(Stage2Test, ClipsByTheNormOfAllGradients) {
  const int world_size = GetParam();
  for (double norm_type : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
    for (auto exchange : {ExchangeKind::kPairwise, ExchangeKind::kSharedMemory}) {
      test::run_ranks(world_size, [&](const ProcessGroupPtr& group) {
        const auto params = test::make_params(7);
        const auto plain_params = test::make_params(7);
        ZeroRedundancyOptimizer zero(params, torch::optim::SGDOptions(1e-1),
                                     options_of({.exchange = exchange}, group));
        optim::SGD plain(plain_params, torch::optim::SGDOptions(1e-1));
        loss_of(params, group->getRank(), 0).backward();
        const double norm = zero.clip_grad_norm_(0.5, norm_type);
        zero.step();
        Tensors sums(params.size());
        add_average(plain_params, world_size, {0}, sums);
        set_all(plain_params, sums);
        Tensors with_elements;  // torch's takes no others for the largest
        for (const auto& param : plain_params) {
          if (param.numel() > 0) with_elements.push_back(param);
        }
        const double expected = torch::nn::utils::clip_grad_norm_(with_elements, 0.5, norm_type);
        EXPECT_NEAR(norm, expected, 1e-5 * expected);
        plain.step();
        for (size_t i = 0; i < params.size(); ++i) {
          // The norms are added up in another order.
          EXPECT_TRUE(torch::allclose(params[i], plain_params[i], 1e-5, 1e-7)) << i;
        }
      });
    }
  }
}

TEST_P(Stage2Test, ClipsByValue) {
  const int world_size = GetParam();
  test::run_ranks(world_size, [&](const ProcessGroupPtr& group) {
    const auto params = test::make_params(7);
    const auto plain_params = test::make_params(7);
    ZeroRedundancyOptimizer zero(params, torch::optim::SGDOptions(1e-1), options_of({}, group));
    optim::SGD plain(plain_params, torch::optim::SGDOptions(1e-1));
    loss_of(params, group->getRank(), 0).backward();
    zero.clip_grad_value_(0.25);
    zero.step();
    Tensors sums(params.size());
    add_average(plain_params, world_size, {0}, sums);
    set_all(plain_params, sums);
    torch::nn::utils::clip_grad_value_(plain_params, 0.25);
    plain.step();
    test::expect_equal(params, plain_params);
  });
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, Stage2Test, testing::Values(1, 2, 3, 4));

class Stage2ExchangeTest : public testing::TestWithParam<ExchangeKind> {};

TEST_P(Stage2ExchangeTest, ParametersStartAsRankZeroHasThem) {
  test::run_ranks(3, [&](const ProcessGroupPtr& group) {
    const auto params = test::make_params(group->getRank());
    ZeroRedundancyOptimizer zero(params, torch::optim::SGDOptions(1e-1),
                                 options_of({.exchange = GetParam()}, group));
    test::expect_equal(params, test::make_params(0));
  });
}

TEST_P(Stage2ExchangeTest, ABackwardPassThatThrowsLeavesTheOptimizerUsable) {
  test::run_ranks(2, [&](const ProcessGroupPtr& group) {
    const int rank = group->getRank();
    const auto params = test::make_params(7);
    const auto plain_params = test::make_params(7);
    ZeroRedundancyOptimizer zero(
        params, torch::optim::AdamOptions(1e-2),
        options_of({.exchange = GetParam(), .bucket_cap_mb = 1e-6}, group));
    optim::Adam plain(plain_params, torch::optim::AdamOptions(1e-2));
    for (int step = 0; step < 3; ++step) {
      if (rank == 0) {
        auto first = params[0] * 2;
        first.register_hook([](const at::Tensor&) { throw std::runtime_error("not today"); });
        EXPECT_THROW((loss_of(params, rank, step) + first.sum()).backward(), std::runtime_error);
      } else {
        loss_of(params, rank, step).backward();
      }
      zero.zero_grad();
      loss_of(params, rank, step).backward();
      zero.step();
      Tensors sums(params.size());
      add_average(plain_params, 2, {step}, sums);
      set_all(plain_params, sums);
      plain.step();
      test::expect_equal(params, plain_params, c10::str("step ", step));
    }
  });
}

TEST_P(Stage2ExchangeTest, ARankWithoutABackwardPassCountsAsZero) {
  test::run_ranks(2, [&](const ProcessGroupPtr& group) {
    const auto params = test::make_params(7);
    const auto plain_params = test::make_params(7);
    ZeroRedundancyOptimizer zero(params, torch::optim::SGDOptions(1e-1),
                                 options_of({.exchange = GetParam()}, group));
    optim::SGD plain(plain_params, torch::optim::SGDOptions(1e-1));
    if (group->getRank() == 1) loss_of(params, 1, 0).backward();
    zero.step();
    auto gradients = gradients_of(plain_params, 1, {0});
    for (auto& gradient : gradients) {
      if (gradient.defined()) gradient.div_(2);
    }
    set_all(plain_params, gradients);
    plain.step();
    test::expect_equal(params, plain_params);
    zero.step();  // nobody has gradients
    test::expect_equal(params, plain_params);
  });
}

// Ranks drift apart at random; whoever is ahead must not overwrite what another still reads.
TEST_P(Stage2ExchangeTest, RandomDelaysChangeNothing) {
  constexpr int kWorldSize = 3, kSteps = 500;
  test::run_ranks(kWorldSize, [&](const ProcessGroupPtr& group) {
    const int rank = group->getRank();
    std::mt19937 random(rank);
    const auto dawdle = [&] {
      if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
    };
    const auto params = test::make_params(7);
    const auto plain_params = test::make_params(7);
    ZeroRedundancyOptimizer zero(
        params, torch::optim::AdamOptions(1e-3),
        options_of({.exchange = GetParam(), .bucket_cap_mb = 3e-4}, group));
    optim::Adam plain(plain_params, torch::optim::AdamOptions(1e-3));
    for (int step = 0; step < kSteps; ++step) {
      Tensors sums(params.size());
      for (int pass = 0; pass <= step % 2; ++pass) {
        const auto loss = loss_of(params, rank, 2 * step + pass);
        dawdle();
        loss.backward();
        dawdle();
        add_average(plain_params, kWorldSize, {2 * step + pass}, sums);
      }
      zero.step();
      set_all(plain_params, sums);
      plain.step();
      dawdle();
    }
    test::expect_equal(params, plain_params);
  });
}

INSTANTIATE_TEST_SUITE_P(Exchanges, Stage2ExchangeTest,
                         testing::Values(ExchangeKind::kPairwise, ExchangeKind::kSharedMemory));

TEST(Stage2, MixedDtypesAndSeveralGroups) {
  for (auto exchange : {ExchangeKind::kPairwise, ExchangeKind::kSharedMemory}) {
    test::run_ranks(3, [&](const ProcessGroupPtr& group) {
      const auto make = [] {
        Tensors params;
        for (auto dtype : {at::kFloat, at::kDouble, at::kFloat}) {
          params.push_back(torch::randn({13, 7}, test::generator(3)).to(dtype).requires_grad_());
        }
        return params;
      };
      const auto groups_of = [](const Tensors& params) {
        std::vector<torch::optim::OptimizerParamGroup> groups;
        groups.emplace_back(Tensors{params[0], params[1]});
        groups.emplace_back(Tensors{params[2]}, std::make_unique<torch::optim::AdamOptions>(5e-2));
        return groups;
      };
      const auto params = make(), plain_params = make();
      ZeroRedundancyOptimizer zero(groups_of(params), torch::optim::AdamOptions(1e-2),
                                   options_of({.exchange = exchange}, group));
      optim::Adam plain(groups_of(plain_params), torch::optim::AdamOptions(1e-2));
      for (int step = 0; step < 4; ++step) {
        loss_of(params, group->getRank(), step).backward();
        zero.step();
        Tensors sums(params.size());
        add_average(plain_params, 3, {step}, sums);
        set_all(plain_params, sums);
        plain.step();
        test::expect_equal(params, plain_params);
      }
    });
  }
}

TEST(Stage2, ChoosesSharedMemoryOnOneHost) {
  test::run_ranks(2, [&](const ProcessGroupPtr& group) {
    ZeroRedundancyOptimizer zero(test::make_params(7), torch::optim::SGDOptions(1e-1),
                                 ZeroOptions().stage(2).process_group(group));
    EXPECT_STREQ(zero.engine().exchange_name(), "shared_memory");
  });
}

TEST(Stage2, RefusesWhatItCannotDo) {
  test::run_ranks(2, [&](const ProcessGroupPtr& group) {
    const auto params = test::make_params(7);
    const torch::optim::SGDOptions sgd(1e-1);
    EXPECT_THROW(ZeroRedundancyOptimizer(params, sgd, ZeroOptions().stage(3).process_group(group)),
                 c10::ValueError);
    EXPECT_THROW(
        ZeroRedundancyOptimizer(params, sgd,
                                ZeroOptions().stage(2).overlap_with_ddp(true).process_group(group)),
        c10::ValueError);
    ZeroRedundancyOptimizer one(params, sgd, ZeroOptions().process_group(group));
    EXPECT_THROW(one.clip_grad_norm_(1), c10::ValueError);
    EXPECT_THROW(one.no_sync(), c10::ValueError);
  });
}

}  // namespace
}  // namespace shardstep
