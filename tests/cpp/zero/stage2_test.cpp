// Stage 2 against a reference that sums the ranks' gradients in rank order, per host and then over
// hosts, and runs the same optimizer unsharded: equal bit for bit.

#include <gtest/gtest.h>

#include <optional>
#include <random>
#include <thread>

#include "shard/shard_engine.h"
#include "shardstep/shardstep.h"
#include "support/full_run.h"
#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep {
namespace {

using Tensors = std::vector<at::Tensor>;

// Those that sum in rank order.
const auto kExchanges = test::exchanges({ExchangeKind::kPairwise, ExchangeKind::kSharedMemory});

struct Way {
  ExchangeKind exchange = test::exchanges({ExchangeKind::kPairwise}).front();
  Sharding sharding = Sharding::kElement;
  double bucket_cap_mb = 0;
  bool flat = false;
  bool share_parameters = false;
  bool overlap_forward = false;
  std::optional<at::ScalarType> gradient_dtype = std::nullopt;
  std::string hosts;  // of the ranks, as SHARDSTEP_TEST_HOSTS takes them; empty: one
};

ZeroOptions options_of(const Way& way, const ProcessGroupPtr& group) {
  return ZeroOptions()
      .stage(2)
      .process_group(group)
      .exchange(way.exchange)
      .sharding(way.sharding)
      .bucket_cap_mb(way.bucket_cap_mb)
      .parameters_as_bucket_view(way.flat)
      .share_parameters(way.share_parameters)
      .overlap_forward(way.overlap_forward)
      .gradient_dtype(way.gradient_dtype);
}

std::string name_of(const Way& way) {
  return c10::str(static_cast<int>(way.exchange), " ", static_cast<int>(way.sharding), " ",
                  way.bucket_cap_mb, " ", way.flat, " ", way.share_parameters, " ",
                  way.overlap_forward, " ", way.gradient_dtype ? *way.gradient_dtype : at::kFloat,
                  " ", way.hosts);
}

std::vector<Way> all_ways() {
  std::vector<Way> ways;
  for (auto exchange : test::exchanges(
           {ExchangeKind::kPairwise, ExchangeKind::kSharedMemory, ExchangeKind::kNative})) {
    for (auto sharding : {Sharding::kElement, Sharding::kParameter}) {
      for (double cap : {0.0, 1e-6, 3e-4}) {
        for (bool flat : {false, true}) ways.push_back({exchange, sharding, cap, flat});
      }
    }
  }
  return ways;
}

// Gloo's own collectives; simccl's sum in rank order.
bool sums_in_any_order(const Way& way) {
  return way.exchange == ExchangeKind::kNative && !test::on_sim_device();
}

// Two ranks take every way; more of them, who are slower, a third in a short run.
std::vector<Way> ways_for(int world_size) {
  const auto ways = all_ways();
  return world_size <= 2 ? ways : test::sample(ways, static_cast<int>(ways.size()) / 3);
}

// Which parameters a rank uses in a pass. No rank uses number 4, only rank 0 uses number 1.
bool uses(int rank, int pass, size_t param) {
  if (param == 4) return false;
  if (param == 1) return rank == 0;
  return (pass + rank + static_cast<int>(param)) % 5 != 0;
}

// Element-wise, so that a gradient has the same bits wherever it is computed.
at::Tensor loss_of(const Tensors& params, int rank, int pass) {
  const auto random = test::generator(1 + 100 * pass + rank);
  auto loss = test::zeros({});
  for (size_t i = 0; i < params.size(); ++i) {
    const auto factor = test::randn(params[i].sizes(), random);
    if (uses(rank, pass, i)) loss = loss + (params[i] * factor).square().sum();
  }
  return loss;
}

// The gradients of one rank for some passes, accumulated as autograd does.
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

// What arrives of a gradient: each owner gets its slice, in memory order.
at::Tensor as_sent(const at::Tensor& term, const Way& way, const std::vector<Slice>& slices) {
  if (!way.gradient_dtype || term.numel() == 0) return term;
  const auto result = term.clone();
  const auto flat = result.as_strided({result.numel()}, {1});
  for (const auto& slice : slices) {
    auto part = flat.narrow(0, slice.elements.begin, slice.elements.size());
    part.copy_(test::as_sent(part.clone(), way.gradient_dtype));
  }
  return result;
}

// Adds the average of what the ranks have given to `sums`, in rank order; with several hosts, per
// host and then over hosts. What travels is rounded for that: gradients, or the hosts' sums.
void add_average(const std::vector<Tensors>& given, const Tensors& params, Tensors& sums,
                 const Way& way, const Partition* partition = nullptr) {
  const auto hosts = test::ranks_by_host(way.hosts, static_cast<int>(given.size()));
  const bool by_host = way.exchange == ExchangeKind::kHierarchical;
  for (size_t i = 0; i < params.size(); ++i) {
    at::Tensor sum;
    bool used = sums[i].defined();  // then a round in which no rank used it adds zeros
    for (const auto& ranks : hosts) {
      at::Tensor of_host;
      for (int rank : ranks) {
        const auto& gradient = given[rank][i];
        used = used || gradient.defined();
        auto term = gradient.defined() ? gradient : torch::zeros_like(params[i]).detach();
        if (!by_host && partition)
          term = as_sent(term, way, partition->slices(static_cast<int64_t>(i)));
        of_host = of_host.defined() ? of_host + term : term.clone();
      }
      if (by_host && hosts.size() > 1 && partition) {
        of_host = as_sent(of_host, way, partition->slices(static_cast<int64_t>(i)));
      }
      sum = sum.defined() ? sum + of_host : of_host;
    }
    if (!used) continue;
    sum.div_(static_cast<int64_t>(given.size()));
    sums[i] = sums[i].defined() ? sums[i] + sum : sum;
  }
}

void add_average(const Tensors& params, int world_size, const std::vector<int>& passes,
                 Tensors& sums, const Way& way = {}, const Partition* partition = nullptr) {
  std::vector<Tensors> given;
  for (int rank = 0; rank < world_size; ++rank) {
    given.push_back(gradients_of(params, rank, passes));
  }
  add_average(given, params, sums, way, partition);
}

void set_all(const Tensors& params, const Tensors& gradients) {
  for (size_t i = 0; i < params.size(); ++i) {
    at::Tensor(params[i]).mutable_grad() = gradients[i];
  }
}

class Stage2Test : public testing::TestWithParam<int> {};

// Six steps equal the reference bit for bit.
void expect_equals_reference(int world_size, const Way& way) {
  SCOPED_TRACE(name_of(way));
  const test::Hosts hosts(way.hosts);
  test::run_ranks(world_size, [&](const ProcessGroupPtr& group) {
    const int rank = group->getRank();
    const auto params = test::make_params(7);
    const auto plain_params = test::make_params(7);
    ZeroRedundancyOptimizer zero(params, torch::optim::AdamWOptions(1e-2), options_of(way, group));
    optim::AdamW plain(plain_params, torch::optim::AdamWOptions(1e-2));
    for (int step = 0; step < 6; ++step) {
      zero.zero_grad();
      zero.wait();
      loss_of(params, rank, step).backward();
      for (const auto& param : params) {
        if (world_size > 1) EXPECT_FALSE(param.grad().has_storage());
      }
      zero.step();
      zero.zero_grad();
      Tensors sums(params.size());
      add_average(plain_params, world_size, {step}, sums, world_size > 1 ? way : Way{},
                  &zero.engine().partition());
      set_all(plain_params, sums);
      plain.step();
      zero.wait();
      test::expect_equal(params, plain_params, c10::str("step ", step));
    }
  });
}

TEST_P(Stage2Test, EqualsTheSumInRankOrderAndThePlainOptimizer) {
  for (const auto& way : ways_for(GetParam())) {
    if (GetParam() > 2 && sums_in_any_order(way)) continue;
    expect_equals_reference(GetParam(), way);
  }
}

// Two and three hosts, with one to three ranks each, in order and mixed.
struct HostCase {
  int world_size;
  Way way;
};

std::vector<HostCase> all_host_cases() {
  std::vector<HostCase> cases;
  for (const std::string hosts : {"a,b", "a,a,b", "a,b,b", "a,b,a,b", "a,a,a,b", "a,b,c",
                                  "a,a,b,b,c", "a,b,c,c,b,a", "a,a,a,b,b,b", "a,a,a,b,c,c"}) {
    const auto world_size = static_cast<int>(hosts.size() + 1) / 2;
    for (auto way : all_ways()) {
      if (way.exchange != ExchangeKind::kSharedMemory) continue;
      way.exchange = ExchangeKind::kHierarchical;
      way.hosts = hosts;
      cases.push_back({world_size, way});
      if (way.flat || way.bucket_cap_mb == 1e-6) continue;
      way.overlap_forward = true;
      cases.push_back({world_size, way});
      way.overlap_forward = false;
      way.share_parameters = true;
      cases.push_back({world_size, way});
      way.share_parameters = false;
      way.gradient_dtype = way.sharding == Sharding::kElement ? at::kBFloat16 : at::kHalf;
      cases.push_back({world_size, way});
      way.gradient_dtype = at::kChar;
      cases.push_back({world_size, way});
    }
  }
  return cases;
}

TEST(Stage2Hosts, EqualsTheSumPerHostAndThenOverHosts) {
  SHARDSTEP_NEEDS_CPU("ranks of a host share memory");
  for (const auto& [world_size, way] : test::sample(all_host_cases(), 16)) {
    expect_equals_reference(world_size, way);
  }
}

TEST(Stage2Hosts, FitTheExchangeToTheHosts) {
  SHARDSTEP_NEEDS_CPU("ranks of a host share memory");
  const auto expect_exchange = [](const std::string& names, const std::string& exchange,
                                  bool share_parameters = false) {
    const test::Hosts hosts(names);
    test::run_ranks(3, [&](const ProcessGroupPtr& group) {
      ZeroRedundancyOptimizer zero(
          test::make_params(7), torch::optim::SGDOptions(1e-1),
          options_of({.exchange = ExchangeKind::kAuto, .share_parameters = share_parameters},
                     group));
      EXPECT_EQ(zero.engine().exchange_name(), exchange);
    });
  };
  expect_exchange("a,a,a", "shared_memory");
  expect_exchange("a,b,c", "pairwise");
  expect_exchange("a,b,a", "hierarchical");
  expect_exchange("a,b,c", "hierarchical", /*share_parameters=*/true);
}

TEST(Stage2Hosts, HaveOneCopyOfSharedParametersEach) {
  SHARDSTEP_NEEDS_CPU("ranks of a host share memory");
  const test::Hosts hosts("a,b,b,a");
  test::run_ranks(4, [&](const ProcessGroupPtr& group) {
    const auto params = test::make_params(7);
    ZeroRedundancyOptimizer zero(
        params, torch::optim::SGDOptions(1e-1),
        options_of({.exchange = ExchangeKind::kAuto, .share_parameters = true}, group));
    at::NoGradGuard no_grad;
    if (group->getRank() < 2) at::Tensor(params[0]).fill_(group->getRank());
    group->barrier()->wait();
    const int first = group->getRank() % 3 == 0 ? 0 : 1;  // of this host
    EXPECT_TRUE(at::equal(params[0], at::full_like(params[0], first)));
  });
}

// Ranks that are late, each in its own places.
TEST(Stage2Hosts, DelaysChangeNothing) {
  SHARDSTEP_NEEDS_CPU("ranks of a host share memory");
  const Way way{.exchange = ExchangeKind::kHierarchical,
                .bucket_cap_mb = 3e-4,
                .overlap_forward = true,
                .hosts = "a,a,b"};
  const test::Hosts hosts(way.hosts);
  test::run_ranks(
      3,
      [&](const ProcessGroupPtr& group) {
        const int rank = group->getRank();
        std::mt19937 random(rank);
        const auto dawdle = [&] {
          if (random() % 3 == 0)
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
        };
        const auto params = test::make_params(7);
        const auto plain_params = test::make_params(7);
        ZeroRedundancyOptimizer zero(params, torch::optim::AdamOptions(1e-2),
                                     options_of(way, group));
        optim::Adam plain(plain_params, torch::optim::AdamOptions(1e-2));
        for (int step = 0; step < test::rounds(10, 500); ++step) {
          zero.wait();
          dawdle();
          loss_of(params, rank, step).backward();
          dawdle();
          zero.step();
          dawdle();
          zero.zero_grad();
          Tensors sums(params.size());
          add_average(plain_params, 3, {step}, sums, way);
          set_all(plain_params, sums);
          plain.step();
          dawdle();
          zero.wait();
          test::expect_equal(params, plain_params, c10::str("step ", step));
        }
      },
      std::chrono::seconds(600));
}

TEST_P(Stage2Test, SharedParametersEqualTheReference) {
  SHARDSTEP_NEEDS_CPU("ranks of a host share memory");
  for (auto sharding : {Sharding::kElement, Sharding::kParameter}) {
    for (double cap : {0.0, 3e-4}) {
      expect_equals_reference(GetParam(), {.exchange = ExchangeKind::kSharedMemory,
                                           .sharding = sharding,
                                           .bucket_cap_mb = cap,
                                           .share_parameters = true});
    }
  }
}

TEST_P(Stage2Test, ParametersThatTravelInTheNextForwardEqualTheReference) {
  for (auto way : ways_for(GetParam())) {
    if (way.flat || (GetParam() > 2 && sums_in_any_order(way))) continue;
    way.overlap_forward = true;
    expect_equals_reference(GetParam(), way);
  }
}

// Also on the backend's own collectives: we sum rounded gradients there too.
TEST_P(Stage2Test, RoundedGradientsAreAddedUpInFullWidth) {
  for (auto way : ways_for(GetParam())) {
    if (way.flat || way.bucket_cap_mb == 1e-6) continue;
    for (auto dtype : {at::kBFloat16, at::kHalf, at::kChar}) {
      way.gradient_dtype = dtype;
      expect_equals_reference(GetParam(), way);
    }
  }
}

TEST_P(Stage2Test, BackwardPassesAddUp) {
  const int world_size = GetParam();
  for (const auto& way : ways_for(world_size)) {
    if (way.flat || sums_in_any_order(way)) continue;
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
        zero.zero_grad();
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

// From the second step on the norm comes with the sum; after a second pass it cannot.
TEST_P(Stage2Test, ClipsByTheNormOfAllGradients) {
  const int world_size = GetParam();
  for (double norm_type : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
    for (auto exchange : kExchanges) {
      test::run_ranks(world_size, [&](const ProcessGroupPtr& group) {
        const auto params = test::make_params(7);
        const auto plain_params = test::make_params(7);
        ZeroRedundancyOptimizer zero(params, torch::optim::SGDOptions(1e-3),
                                     options_of({.exchange = exchange}, group));
        optim::SGD plain(plain_params, torch::optim::SGDOptions(1e-3));
        Tensors with_elements;  // torch's takes no others for the largest
        for (const auto& param : plain_params) {
          if (param.numel() > 0) with_elements.push_back(param);
        }
        for (int step = 0; step < 4; ++step) {
          Tensors sums(params.size());
          for (int pass = 2 * step; pass <= 2 * step + step / 2; ++pass) {
            loss_of(params, group->getRank(), pass).backward();
            add_average(plain_params, world_size, {pass}, sums);
          }
          const double norm = zero.clip_grad_norm_(0.5, norm_type);
          EXPECT_NEAR(zero.clip_grad_norm_(1e9, norm_type), 0.5, 1e-5);  // of what is clipped
          zero.step();
          zero.zero_grad();
          set_all(plain_params, sums);
          const double expected = torch::nn::utils::clip_grad_norm_(with_elements, 0.5, norm_type);
          EXPECT_NEAR(norm, expected, 1e-5 * expected);
          plain.step();
          for (size_t i = 0; i < params.size(); ++i) {
            // The norms are summed in another order.
            EXPECT_TRUE(torch::allclose(params[i], plain_params[i], 1e-5, 1e-7)) << i;
          }
        }
      });
    }
  }
}

// Rank r has r batches: those that have joined clip along, and count as zeros.
TEST_P(Stage2Test, RanksThatHaveJoinedClipAlong) {
  const int world_size = GetParam();
  for (auto exchange : kExchanges) {
    test::run_ranks(world_size, [&](const ProcessGroupPtr& group) {
      const int rank = group->getRank();
      const auto params = test::make_params(7);
      const auto plain_params = test::make_params(7);
      ZeroRedundancyOptimizer zero(params, torch::optim::SGDOptions(1e-3),
                                   options_of({.exchange = exchange}, group));
      optim::SGD plain(plain_params, torch::optim::SGDOptions(1e-3));
      {
        Join join({zero});
        for (int step = 0; step < rank; ++step) {
          zero.zero_grad();
          loss_of(params, rank, step).backward();
          zero.clip_grad_value_(0.4);
          zero.clip_grad_norm_(0.5);
          zero.step();
        }
        join.finish();
      }
      for (int step = 0; step + 1 < world_size; ++step) {
        Tensors sums(params.size());
        std::vector<Tensors> given(world_size, sums);
        for (int other = step + 1; other < world_size; ++other) {
          given[other] = gradients_of(plain_params, other, {step});
        }
        add_average(given, plain_params, sums, {});
        set_all(plain_params, sums);
        torch::nn::utils::clip_grad_value_(plain_params, 0.4);
        torch::nn::utils::clip_grad_norm_(plain_params, 0.5);
        plain.step();
      }
      for (size_t i = 0; i < params.size(); ++i) {
        EXPECT_TRUE(torch::allclose(params[i], plain_params[i], 1e-5, 1e-7)) << i;
      }
    });
  }
}

// Rank r has r batches in one Join, and the last rank none in the next. Ranks that have joined do
// not run the zero_grad() after the last step.
TEST_P(Stage2Test, GradientsAreForgottenAfterTheLastStepOfAJoin) {
  const int world_size = GetParam();
  for (auto exchange : kExchanges) {
    test::run_ranks(world_size, [&](const ProcessGroupPtr& group) {
      const int rank = group->getRank();
      const auto params = test::make_params(7);
      const auto plain_params = test::make_params(7);
      ZeroRedundancyOptimizer zero(params, torch::optim::SGDOptions(1e-3),
                                   options_of({.exchange = exchange}, group));
      optim::SGD plain(plain_params, torch::optim::SGDOptions(1e-3));
      for (int epoch = 0; epoch < 3; ++epoch) {
        const auto count = [&](int r) { return epoch == 1 ? world_size - 1 - r : r; };
        Join join({zero});
        for (int step = 0; step < count(rank); ++step) {
          loss_of(params, rank, step).backward();
          zero.step();
          zero.zero_grad();
        }
        join.finish();
        for (int step = 0; step + 1 < world_size; ++step) {
          Tensors sums(params.size());
          std::vector<Tensors> given(world_size, sums);
          for (int other = 0; other < world_size; ++other) {
            if (step < count(other)) given[other] = gradients_of(plain_params, other, {step});
          }
          add_average(given, plain_params, sums, {});
          set_all(plain_params, sums);
          plain.step();
        }
        test::expect_equal(params, plain_params, c10::str("epoch ", epoch));
      }
    });
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
    zero.zero_grad();
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
      zero.zero_grad();
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
    zero.zero_grad();
    auto gradients = gradients_of(plain_params, 1, {0});
    for (auto& gradient : gradients) {
      if (gradient.defined()) gradient.div_(2);
    }
    set_all(plain_params, gradients);
    plain.step();
    test::expect_equal(params, plain_params);
    zero.step();  // no rank has gradients
    test::expect_equal(params, plain_params);
  });
}

// Not even for a rank whose forward pass has thrown.
TEST_P(Stage2ExchangeTest, ZeroGradWaitsForNobody) {
  test::run_ranks(2, [&](const ProcessGroupPtr& group) {
    const auto params = test::make_params(7);
    const auto plain_params = test::make_params(7);
    ZeroRedundancyOptimizer zero(params, torch::optim::SGDOptions(1e-1),
                                 options_of({.exchange = GetParam()}, group));
    optim::SGD plain(plain_params, torch::optim::SGDOptions(1e-1));
    for (bool set_to_none : {true, false}) {
      if (group->getRank() == 1) loss_of(params, 1, 0).backward();
      zero.zero_grad(set_to_none);
      loss_of(params, 2, group->getRank()).backward();
      // This gradient may have been added to one that rank 1 has forgotten.
      EXPECT_THROW(zero.step(), c10::Error);
      test::expect_equal(params, plain_params);
      zero.zero_grad();
    }
    loss_of(params, 2, group->getRank()).backward();
    zero.step();
    auto gradients = gradients_of(plain_params, 2, {0, 1});
    for (auto& gradient : gradients) {
      if (gradient.defined()) gradient.div_(2);
    }
    set_all(plain_params, gradients);
    plain.step();
    test::expect_equal(params, plain_params);
  });
}

// As the plain optimizer's `.grad` does, also for a part of the parameters.
TEST_P(Stage2ExchangeTest, SumsLiveUntilZeroGrad) {
  test::run_ranks(2, [&](const ProcessGroupPtr& group) {
    const auto params = test::make_params(7);
    const auto plain_params = test::make_params(7);
    for (bool overlap_forward : {false, true}) {
      ZeroRedundancyOptimizer zero(
          params, torch::optim::SGDOptions(1e-1),
          options_of({.exchange = GetParam(), .overlap_forward = overlap_forward}, group));
      optim::SGD plain(plain_params, torch::optim::SGDOptions(1e-1));
      Tensors sums(params.size());
      for (int step = 0; step < 6; ++step) {
        if (step == 3) {
          zero.zero_grad();
          for (auto& sum : sums) sum.reset();
        } else if (step == 4) {
          at::Tensor(params[0]).mutable_grad().reset();
          sums[0].reset();
        } else if (step == 5) {
          zero.zero_grad(/*set_to_none=*/false);
          for (auto& sum : sums) {
            if (sum.defined()) sum.zero_();
          }
        }
        zero.wait();
        loss_of(params, group->getRank(), step).backward();
        zero.step();
        zero.wait();
        add_average(plain_params, 2, {step}, sums);
        set_all(plain_params, sums);
        plain.step();
        test::expect_equal(params, plain_params, c10::str("step ", step));
        for (size_t i = 0; i < params.size(); ++i) {
          const auto whole = zero.full_gradient(params[i]);
          ASSERT_EQ(whole.defined(), sums[i].defined()) << i;
          if (whole.defined()) EXPECT_TRUE(at::equal(whole, sums[i])) << i;
        }
      }
    }
  });
}

TEST_P(Stage2ExchangeTest, RanksMayAskForDifferentWholeGradients) {
  test::run_ranks(2, [&](const ProcessGroupPtr& group) {
    for (auto sharding : {Sharding::kParameter, Sharding::kElement}) {
      const auto params = test::make_params(7), plain_params = test::make_params(7);
      ZeroRedundancyOptimizer zero(
          params, torch::optim::SGDOptions(1e-1),
          options_of({.exchange = GetParam(), .sharding = sharding}, group));
      loss_of(params, group->getRank(), 0).backward();
      std::vector<at::Tensor> sums(params.size());
      add_average(plain_params, 2, {0}, sums);
      for (size_t i = 0; i < params.size(); ++i) {
        const size_t asked = group->getRank() == 0 ? i : params.size() - 1 - i;
        const auto whole = zero.full_gradient(params[asked]);
        ASSERT_EQ(whole.defined(), sums[asked].defined()) << asked;
        if (whole.defined()) EXPECT_TRUE(at::equal(whole, sums[asked])) << asked;
      }
    }
  });
}

// Whatever the others ask at that moment, and the optimizer goes on afterwards.
TEST_P(Stage2ExchangeTest, AForeignTensorIsAnErrorOnEveryRank) {
  test::run_ranks(3, [&](const ProcessGroupPtr& group) {
    const auto params = test::make_params(7), plain_params = test::make_params(7);
    ZeroRedundancyOptimizer zero(params, torch::optim::SGDOptions(1e-1),
                                 options_of({.exchange = GetParam()}, group));
    loss_of(params, group->getRank(), 0).backward();
    const auto message = test::error_of<c10::ValueError>([&] {
      if (group->getRank() == 0) zero.step();
      if (group->getRank() == 1) zero.full_gradient(torch::ones(2));
      if (group->getRank() == 2) zero.full_gradient(params[0]);
    });
    EXPECT_NE(message.find("got another tensor on rank 1"), std::string::npos) << message;
    const auto whole = zero.full_gradient(params[0]);
    Tensors sums(params.size());
    add_average(plain_params, 3, {0}, sums);
    EXPECT_TRUE(at::equal(whole, sums[0]));
  });
}

TEST_P(Stage2ExchangeTest, GenericCodeFailsLoudly) {
  test::run_ranks(2, [&](const ProcessGroupPtr& group) {
    const auto params = test::make_params(7);
    ZeroRedundancyOptimizer zero(params, torch::optim::SGDOptions(1e-1),
                                 options_of({.exchange = GetParam()}, group));
    loss_of(params, group->getRank(), 0).backward();
    EXPECT_THROW(torch::nn::utils::clip_grad_norm_(params, 1.0), c10::Error);
    EXPECT_THROW(torch::nn::utils::clip_grad_value_(params, 1.0), c10::Error);
    auto grad = params[0].grad();
    EXPECT_THROW(grad.set_data(torch::zeros_like(params[0])), c10::Error);
    EXPECT_THROW(grad.data().mul_(0.5), c10::Error);
    EXPECT_THROW(grad.clone(), c10::Error);
    EXPECT_THROW(grad.data_ptr(), c10::Error);
    static_cast<torch::optim::Optimizer&>(zero).zero_grad();
    for (const auto& param : params) EXPECT_FALSE(param.grad().defined());
    zero.step();
  });
}

// Ranks drift apart at random; a rank that is ahead must not overwrite what another still reads.
TEST_P(Stage2ExchangeTest, RandomDelaysChangeNothing) {
  constexpr int kWorldSize = 3;
  const int steps = test::rounds(50, 500);
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
    for (int step = 0; step < steps; ++step) {
      Tensors sums(params.size());
      for (int pass = 0; pass <= step % 2; ++pass) {
        const auto loss = loss_of(params, rank, 2 * step + pass);
        dawdle();
        loss.backward();
        dawdle();
        add_average(plain_params, kWorldSize, {2 * step + pass}, sums);
      }
      zero.step();
      zero.zero_grad();
      set_all(plain_params, sums);
      plain.step();
      dawdle();
    }
    test::expect_equal(params, plain_params);
  });
}

INSTANTIATE_TEST_SUITE_P(Exchanges, Stage2ExchangeTest, testing::ValuesIn(kExchanges));

TEST(Stage2, MixedDtypesAndSeveralGroups) {
  for (auto exchange : kExchanges) {
    test::run_ranks(3, [&](const ProcessGroupPtr& group) {
      const auto make = [] {
        Tensors params;
        for (auto dtype : {at::kFloat, at::kDouble, at::kFloat}) {
          params.push_back(test::randn({13, 7}, test::generator(3)).to(dtype).requires_grad_());
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
        zero.zero_grad();
        Tensors sums(params.size());
        add_average(plain_params, 3, {step}, sums);
        set_all(plain_params, sums);
        plain.step();
        test::expect_equal(params, plain_params);
      }
    });
  }
}

// A model, its training and how it is sharded, all drawn from a seed.
struct RandomCase {
  int world_size;
  Way way;
  std::vector<std::vector<int64_t>> shapes;
  std::vector<at::ScalarType> dtypes;
  size_t first_of_second_group;
  std::vector<std::vector<int>> passes;  // by step
  std::vector<std::vector<bool>> used;   // by pass * world size + rank, and parameter
  std::optional<double> clip_value;
};

RandomCase random_case(int seed) {
  std::mt19937 random(seed);
  const auto up_to = [&](int limit) { return static_cast<int>(random() % (limit + 1)); };
  RandomCase c{.world_size = 1 + up_to(3)};
  const auto exchanges = test::exchanges(
      {ExchangeKind::kPairwise, ExchangeKind::kSharedMemory, ExchangeKind::kHierarchical});
  c.way.exchange = exchanges[up_to(static_cast<int>(exchanges.size()) - 1)];
  for (int rank = 0; c.way.exchange == ExchangeKind::kHierarchical && rank < c.world_size; ++rank) {
    c.way.hosts += c10::str(rank == 0 ? "" : ",", up_to(2));
  }
  c.way.sharding = up_to(2) ? Sharding::kElement : Sharding::kParameter;
  c.way.bucket_cap_mb = std::vector<double>{0, 1e-6, 1e-4, 1e-3}[up_to(3)];
  c.way.flat = up_to(1);
  const bool shares_memory = c.way.exchange == ExchangeKind::kSharedMemory ||
                             c.way.exchange == ExchangeKind::kHierarchical;
  c.way.share_parameters = shares_memory && up_to(1);
  c.way.overlap_forward = up_to(1);
  if (up_to(3) == 0)
    c.way.gradient_dtype = std::vector{at::kBFloat16, at::kHalf, at::kChar}[up_to(2)];
  const int params = 1 + up_to(7);
  const bool mixed = c.way.sharding == Sharding::kElement && up_to(1);
  for (int i = 0; i < params; ++i) {
    auto& shape = c.shapes.emplace_back();
    for (int axis = up_to(3); axis > 0; --axis) shape.push_back(up_to(12));
    c.dtypes.push_back(mixed && up_to(1) ? at::kDouble : at::kFloat);
  }
  c.first_of_second_group = 1 + up_to(params - 1);
  int passes = 0;
  for (int step = 0; step < 3; ++step) {
    auto& own = c.passes.emplace_back();
    for (int pass = up_to(2); pass >= 0; --pass) own.push_back(passes++);
  }
  for (int i = 0; i < passes * c.world_size; ++i) {
    auto& used = c.used.emplace_back();
    for (int param = 0; param < params; ++param) used.push_back(up_to(4) > 0);
    used[up_to(params - 1)] = true;  // ranks make equally many backward passes
  }
  if (up_to(2) == 0) c.clip_value = 0.5;
  return c;
}

TEST(Stage2, RandomModelsEqualTheReference) {
  for (int seed : test::sample(90, 16)) {
    const auto c = random_case(seed);
    SCOPED_TRACE(c10::str("seed ", seed, ", ", c.world_size, " ranks, ", name_of(c.way)));
    const test::Hosts hosts(c.way.hosts);
    test::run_ranks(c.world_size, [&](const ProcessGroupPtr& group) {
      const auto make = [&] {
        const auto random = test::generator(seed);
        Tensors params;
        for (size_t i = 0; i < c.shapes.size(); ++i) {
          params.push_back(test::randn(c.shapes[i], random).to(c.dtypes[i]).requires_grad_());
        }
        return params;
      };
      const auto groups_of = [&](const Tensors& params) {
        const auto second = params.begin() + static_cast<std::ptrdiff_t>(c.first_of_second_group);
        std::vector<torch::optim::OptimizerParamGroup> groups;
        groups.emplace_back(Tensors(params.begin(), second));
        if (second != params.end()) {
          groups.emplace_back(Tensors(second, params.end()),
                              std::make_unique<torch::optim::AdamOptions>(5e-2));
        }
        return groups;
      };
      const auto backward = [&](const Tensors& params, int rank, int pass) {
        const auto random = test::generator(1000 * seed + 10 * pass + rank);
        at::Tensor loss = test::zeros({}, at::kDouble);
        for (size_t i = 0; i < params.size(); ++i) {
          const auto factor = test::randn(params[i].sizes(), random).to(params[i].scalar_type());
          if (c.used[pass * c.world_size + rank][i]) {
            loss = loss + (params[i] * factor).square().sum().to(at::kDouble);
          }
        }
        loss.backward();
      };
      const auto params = make(), plain_params = make();
      ZeroRedundancyOptimizer zero(groups_of(params), torch::optim::AdamOptions(1e-2),
                                   options_of(c.way, group));
      optim::Adam plain(groups_of(plain_params), torch::optim::AdamOptions(1e-2));
      for (const auto& passes : c.passes) {
        Tensors sums(params.size());
        for (int pass : passes) {
          zero.wait();
          backward(params, group->getRank(), pass);
          // In a group of one, autograd accumulates.
          std::vector<Tensors> given;
          for (int rank = 0; rank < c.world_size; ++rank) {
            if (c.world_size > 1 || pass == passes.front()) plain.zero_grad();
            backward(plain_params, rank, pass);
            auto& gradients = given.emplace_back();
            for (const auto& param : plain_params) gradients.push_back(param.grad());
          }
          if (c.world_size == 1) {
            sums = given.front();
          } else {
            add_average(given, params, sums, c.way, &zero.engine().partition());
          }
        }
        if (c.clip_value) zero.clip_grad_value_(*c.clip_value);
        zero.step();
        zero.zero_grad();
        zero.wait();
        set_all(plain_params, sums);
        if (c.clip_value) {
          for (const auto& gradient : sums) {
            if (gradient.defined()) at::Tensor(gradient).clamp_(-*c.clip_value, *c.clip_value);
          }
        }
        plain.step();
        test::expect_equal(params, plain_params);
      }
    });
  }
}

TEST(Stage2, RanksHaveOneCopyOfSharedParameters) {
  SHARDSTEP_NEEDS_CPU("ranks of a host share memory");
  test::run_ranks(2, [&](const ProcessGroupPtr& group) {
    const auto params = test::make_params(7);
    ZeroRedundancyOptimizer zero(
        params, torch::optim::SGDOptions(1e-1),
        options_of({.exchange = ExchangeKind::kSharedMemory, .share_parameters = true}, group));
    at::NoGradGuard no_grad;
    if (group->getRank() == 1) at::Tensor(params[0]).fill_(42);
    group->barrier()->wait();
    EXPECT_TRUE(at::equal(params[0], at::full_like(params[0], 42)));
  });
}

TEST(Stage2, ChoosesSharedMemoryOnOneHost) {
  SHARDSTEP_NEEDS_CPU("ranks of a host share memory");
  test::run_ranks(2, [&](const ProcessGroupPtr& group) {
    ZeroRedundancyOptimizer zero(test::make_params(7), torch::optim::SGDOptions(1e-1),
                                 ZeroOptions().stage(2).process_group(group));
    EXPECT_STREQ(zero.engine().exchange_name(), "shared_memory");
  });
}

TEST(Stage2, IsRefusedUnderDdp) {
  test::run_ranks(2, [&](const ProcessGroupPtr& group) {
    const auto options = ZeroOptions().stage(2).process_group(group);
    const torch::optim::SGDOptions sgd(1e-1);
    test::Linear first(4, 4), last(4, 4);
    const DistributedDataParallel wrapped(first,
                                          DistributedDataParallelOptions().process_group(group));
    EXPECT_THROW(ZeroRedundancyOptimizer(first->parameters(), sgd, options), c10::ValueError);
    ZeroRedundancyOptimizer zero(last->parameters(), sgd, options);
    DistributedDataParallel later(last, DistributedDataParallelOptions().process_group(group));
    EXPECT_THROW(later.forward(test::ones({4})).sum().backward(), c10::Error);
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
    const auto refused = [&](const ZeroOptions& options) {
      EXPECT_THROW(ZeroRedundancyOptimizer(params, sgd, ZeroOptions(options).process_group(group)),
                   c10::ValueError);
    };
    refused(ZeroOptions().share_parameters(true));
    refused(ZeroOptions().overlap_forward(true));
    refused(ZeroOptions().gradient_dtype(at::kHalf));
    refused(ZeroOptions().stage(2).gradient_dtype(at::kFloat));
    refused(ZeroOptions().stage(2).share_parameters(true).exchange(ExchangeKind::kPairwise));
  });
}

}  // namespace
}  // namespace shardstep
