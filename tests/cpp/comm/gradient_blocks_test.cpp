#include "comm/gradient_blocks.h"

#include <gtest/gtest.h>

#include <limits>

#include "comm/make_exchange.h"
#include "support/full_run.h"
#include "support/test_support.h"
#include "support/torch.h"

namespace shardstep {
namespace {

using detail::from_blocks;
using detail::to_blocks;

constexpr auto kInfinity = std::numeric_limits<float>::infinity();

// Values of magnitudes that differ by block.
at::Tensor some_gradient(int64_t size, int seed, at::ScalarType dtype = at::kFloat) {
  const auto random = test::generator(seed);
  const auto magnitude = torch::randn({size / 256 + 1}, random).mul(4).exp();
  return (torch::randn({size}, random) * magnitude.repeat_interleave(256).narrow(0, 0, size))
      .to(dtype);
}

std::vector<at::Tensor> restored(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> into;
  for (const auto& tensor : tensors) into.push_back(at::empty({tensor.numel()}));
  const auto message = to_blocks(tensors);
  EXPECT_EQ(message.numel(), detail::bytes_in_blocks(tensors));
  from_blocks(message, into);
  return into;
}

TEST(GradientBlocks, EqualTheirDefinition) {
  for (auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (int seed = 0; seed < 20; ++seed) {
      std::vector<at::Tensor> tensors;
      for (int64_t size : {0, 1, 255, 256, 257, 5000 + seed}) {
        tensors.push_back(some_gradient(size, seed, dtype));
      }
      const auto arrived = restored(tensors);
      for (size_t i = 0; i < tensors.size(); ++i) {
        const auto expected = test::as_sent(tensors[i].to(at::kFloat), at::kChar);
        // A half may be infinite.
        ASSERT_TRUE(at::allclose(arrived[i], expected, 0, 0, /*equal_nan=*/true)) << dtype << i;
      }
    }
  }
}

TEST(GradientBlocks, AreOffByAtMostHalfAScale) {
  for (int seed = 0; seed < 50; ++seed) {
    const auto gradient = some_gradient(10000, seed);
    const auto error = (restored({gradient})[0] - gradient).abs();
    const auto blocks = gradient.split(256), errors = error.split(256);
    for (size_t b = 0; b < blocks.size(); ++b) {
      const double bound = blocks[b].abs().max().item<double>() / 127 / 2 * (1 + 1e-4);
      ASSERT_LE(errors[b].max().item<double>(), bound);
    }
  }
}

TEST(GradientBlocks, KeepZerosAndTheSmallestNumbersSmall) {
  EXPECT_TRUE(at::equal(restored({at::zeros({300})})[0], at::zeros({300})));
  const auto tiny = at::full({300}, 1e-44f);
  EXPECT_LE(restored({tiny})[0].abs().max().item<float>(), 1e-38f);
  const auto largest = at::full({300}, 3e38f);
  EXPECT_TRUE(at::allclose(restored({largest})[0], largest));
}

TEST(GradientBlocks, CarryWhatIsNotFinite) {
  for (float odd : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    auto gradient = some_gradient(1000, 1);
    gradient[300] = odd;
    const auto arrived = restored({gradient})[0];
    EXPECT_TRUE(arrived.narrow(0, 256, 256).isnan().all().item<bool>());
    EXPECT_TRUE(arrived.narrow(0, 0, 256).isfinite().all().item<bool>());
    EXPECT_TRUE(arrived.narrow(0, 512, 488).isfinite().all().item<bool>());
  }
}

TEST(GradientBlocks, OfARangeAreThoseOfTheWhole) {
  for (auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto gradient = some_gradient(3000, 1, dtype);
    const auto whole = restored({gradient})[0];
    for (const auto& [begin, size] : std::vector<std::pair<int64_t, int64_t>>{
             {0, 3000}, {1, 1}, {200, 400}, {256, 256}, {2900, 100}, {3000, 0}}) {
      const auto part = at::empty({size});
      detail::through_blocks(gradient, begin, part);
      EXPECT_TRUE(at::equal(part, whole.narrow(0, begin, size))) << begin;
    }
  }
}

// Every exchange but the hierarchical one, for which see there: the owner's sum is that of what
// each rank would have sent, in rank order.
TEST(GradientBlocks, AreSummedInRankOrderByEveryExchange) {
  constexpr int kRanks = 3;
  const auto make = [](int rank, at::ScalarType dtype) {
    Parts parts(kRanks);
    for (int owner = 0; owner < kRanks; ++owner) {
      // Rank 2 owns nothing; pieces of shared memory end inside a block.
      if (owner == 2) continue;
      for (int64_t size : {100, 0, 140000 * owner + 1, 300}) {
        parts[owner].push_back(some_gradient(size, 10 * rank + owner, dtype));
      }
    }
    return parts;
  };
  const auto check = [&](Exchange& exchange, int self, at::ScalarType posted, at::ScalarType sum) {
    std::vector<int64_t> numel;
    for (const auto& part : make(0, posted)) {
      numel.push_back(0);
      for (const auto& tensor : part) numel.back() += tensor.numel();
    }
    const auto reduction =
        exchange.make_reduction({.numel = numel,
                                 .tensor = sum,
                                 .posted = posted == sum ? std::nullopt : std::optional(posted),
                                 .wire = at::kChar,
                                 .tag = {MessageKind::kGradients, 0},
                                 .divisor = kRanks});
    for (int round = 0; round < 2; ++round) {
      reduction->post(make(self + round, posted), true);
      const auto total = reduction->finish();
      int64_t offset = 0;
      for (size_t i = 0; i < make(0, posted)[self].size(); ++i) {
        at::Tensor expected;
        for (int rank = 0; rank < kRanks; ++rank) {
          const auto term =
              test::as_sent(make(rank + round, posted)[self][i].to(at::kFloat), at::kChar)
                  .to(sum == at::kDouble ? at::kDouble : at::kFloat);
          expected = expected.defined() ? expected + term : term;
        }
        expected = expected.div(kRanks).to(sum);
        ASSERT_TRUE(at::equal(total.narrow(0, offset, expected.numel()), expected)) << i;
        offset += expected.numel();
      }
      if (const auto squares = reduction->squares()) {
        const double exact = total.to(at::kDouble).square().sum().item<double>();
        EXPECT_NEAR(*squares, exact, 1e-6 * exact);
      }
    }
  };
  for (auto kind : {ExchangeKind::kPairwise, ExchangeKind::kSharedMemory, ExchangeKind::kNative}) {
    test::run_ranks(kRanks, [&](const ProcessGroupPtr& group) {
      const auto exchange = make_exchange(group, {.kind = kind});
      check(*exchange, group->getRank(), at::kFloat, at::kFloat);
      check(*exchange, group->getRank(), at::kBFloat16, at::kFloat);
      check(*exchange, group->getRank(), at::kBFloat16, at::kBFloat16);
      check(*exchange, group->getRank(), at::kDouble, at::kDouble);
    });
  }
}

}  // namespace
}  // namespace shardstep
