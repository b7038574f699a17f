// stats().

#include <gtest/gtest.h>

#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep {
namespace {

using test::run_ranks;

TEST(ZeroStats, StatsCountEachPhase) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    torch::nn::Linear net(64, 64);
    ZeroRedundancyOptimizer zero(net->parameters(), torch::optim::AdamWOptions(0.1),
                                 ZeroOptions()
                                     .process_group(group)
                                     .stage(2)
                                     .sharding(Sharding::kElement)
                                     .exchange(ExchangeKind::kPairwise));
    for (int i = 0; i < 3; ++i) {
      zero.zero_grad();
      net(at::ones({2, 64})).square().mean().backward();
      zero.step();
    }
    const auto stats = zero.stats();
    for (const char* phase : {"post", "reduce", "compare", "update", "gather"}) {
      EXPECT_EQ(stats.phases.at(phase).calls, 3) << phase;
      EXPECT_GT(stats.phases.at(phase).seconds, 0) << phase;
    }
    EXPECT_EQ(stats.exchange, "pairwise");
    EXPECT_EQ(stats.buckets, 1);
    EXPECT_EQ(stats.gradient_bytes, 4 * (64 * 64 + 64) / 2);
    EXPECT_GT(stats.bytes_sent, 3 * 2 * 4 * 64 * 64 / 2);
    EXPECT_EQ(stats.bytes_shared, 0);
    zero.reset_stats();
    EXPECT_EQ(zero.stats().bytes_sent, 0);
    EXPECT_EQ(zero.stats().phases.at("update").calls, 0);
  });
}

TEST(ZeroStats, BytesThatAHostShares) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    torch::nn::Linear net(64, 64);
    ZeroRedundancyOptimizer zero(net->parameters(), torch::optim::AdamWOptions(0.1),
                                 ZeroOptions()
                                     .process_group(group)
                                     .stage(2)
                                     .sharding(Sharding::kElement)
                                     .exchange(ExchangeKind::kSharedMemory));
    net(at::ones({2, 64})).square().mean().backward();
    zero.step();
    const auto stats = zero.stats();
    EXPECT_EQ(stats.bytes_sent, 0);
    EXPECT_GE(stats.bytes_shared, 4 * (64 * 64 + 64) / 2);  // at least the half of the other rank
    zero.reset_stats();
    EXPECT_EQ(zero.stats().bytes_shared, 0);
  });
}

}  // namespace
}  // namespace shardstep
