#include "shard/stochastic_rounding.h"

#include <gtest/gtest.h>

#include <limits>

#include "support/torch.h"

namespace shardstep {
namespace {

at::Tensor rounded_with(const at::Tensor& wide, const RoundingNoise& noise, bool by_ops = false) {
  const auto narrow = torch::empty_like(wide, wide.options().dtype(at::kBFloat16));
  (by_ops ? round_stochastically_by_ops : round_stochastically)(wide, narrow, noise);
  return narrow;
}

TEST(StochasticRounding, GoesUpAndDownSoThatTheAverageIsTheValue) {
  constexpr int64_t kDraws = 200'000;
  for (const double value : {1.0 + 1e-4, -3.3, 1e-30, 12345.678, 1.0 / 3}) {
    const auto wide = torch::full({kDraws}, value, at::kFloat);
    const auto exact = wide[0].item<double>();
    const auto narrow = rounded_with(wide, {.seed = 7, .param = 3}).to(at::kDouble);
    const auto [unique, _] = at::_unique(narrow);
    ASSERT_EQ(unique.numel(), 2) << value;
    const double step = (unique[1] - unique[0]).item<double>();
    // Six standard deviations of the mean, at most.
    EXPECT_NEAR(narrow.mean().item<double>(), exact, 3 * step / std::sqrt(kDraws)) << value;
    const double low = std::min(unique[0].item<double>(), unique[1].item<double>());
    EXPECT_TRUE(low < exact && exact < low + step) << value;
  }
}

TEST(StochasticRounding, LeavesWhatBFloat16HasAlone) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const auto exact = torch::randn({5000}).to(at::kBFloat16);
  const auto odd = torch::tensor({0.0F, -0.0F, kInf, -kInf, 1.0F, -256.0F});
  for (bool by_ops : {false, true}) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      EXPECT_TRUE(at::equal(rounded_with(exact.to(at::kFloat), {.seed = seed}, by_ops), exact));
      EXPECT_TRUE(at::equal(rounded_with(odd, {.seed = seed}, by_ops).view(at::kShort),
                            odd.to(at::kBFloat16).view(at::kShort)));
    }
    // All bits set, as well as a payload that bfloat16 has no room for.
    const auto nan = torch::tensor({0x7fffffff, -1, 0x7f800001}, at::kInt).view(at::kFloat);
    EXPECT_TRUE(rounded_with(nan, {.seed = 1}, by_ops).isnan().all().item<bool>());
  }
}

TEST(StochasticRounding, DependsOnSeedParameterAndPlaceButNotOnTheDivision) {
  const auto wide = torch::randn({64, 7, 3, 5}).to(at::MemoryFormat::ChannelsLast);
  const auto flat = wide.permute({0, 2, 3, 1}).reshape(-1);
  for (const auto& noise : {RoundingNoise{.seed = 5}, RoundingNoise{.seed = ~0ULL, .param = 9},
                            RoundingNoise{.seed = 5, .param = 1}}) {
    const auto whole = rounded_with(wide, noise);
    EXPECT_TRUE(at::equal(whole, rounded_with(wide, noise, true)));
    auto part = noise;
    part.first = 1001;
    EXPECT_TRUE(at::equal(whole.permute({0, 2, 3, 1}).reshape(-1).slice(0, 1001),
                          rounded_with(flat.slice(0, 1001).clone(), part)));
    EXPECT_FALSE(at::equal(whole, rounded_with(wide, {.seed = 6})));
  }
}

TEST(StochasticRounding, NoiseHasNoPattern) {
  // Neighbours, parameters and seeds: correlations of 100,000 pairs are within 6 standard
  // deviations of 0.
  constexpr int64_t kPairs = 100'000;
  const auto wide = torch::full({kPairs}, 1 + 1.0 / 256);  // up or down with equal probability
  const auto signs = [&](const RoundingNoise& noise) {
    return rounded_with(wide, noise).gt(1).to(at::kDouble).mul(2).sub(1);
  };
  const auto base = signs({.seed = 11});
  const auto expect_unrelated = [&](const at::Tensor& other) {
    EXPECT_LT(std::abs(base.narrow(0, 0, other.numel()).dot(other).item<double>()),
              6 * std::sqrt(kPairs));
  };
  for (int64_t by : {1, 2, 3, 64, 4096, 65536}) expect_unrelated(base.slice(0, by));
  for (uint64_t seed = 12; seed < 20; ++seed) expect_unrelated(signs({.seed = seed}));
  for (int64_t param = 1; param < 8; ++param) expect_unrelated(signs({.seed = 11, .param = param}));
}

TEST(TemporaryCopy, HasMemoryDuringAnUpdateOnly) {
  const auto own = torch::randn({3, 4}).to(at::kBFloat16);
  TemporaryCopy copy(own);
  const auto* const identity = copy.tensor().unsafeGetTensorImpl();
  EXPECT_FALSE(copy.has_memory());
  EXPECT_EQ(copy.tensor().sizes(), own.sizes());
  EXPECT_THROW(copy.tensor().sum(), c10::Error);
  copy.widen(own);
  EXPECT_TRUE(at::equal(copy.tensor(), own.to(at::kFloat)));
  copy.tensor().detach().fill_(2);
  copy.round_into(own, {});
  EXPECT_FALSE(copy.has_memory());
  EXPECT_TRUE(own.eq(2).all().item<bool>());
  EXPECT_THROW(copy.tensor().sum(), c10::Error);
  EXPECT_EQ(copy.tensor().unsafeGetTensorImpl(), identity);
}

}  // namespace
}  // namespace shardstep
