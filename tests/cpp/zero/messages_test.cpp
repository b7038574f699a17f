// How many messages a step sends: they grow with hosts and buckets, not with parameters, nor with
// the square of the ranks.

#include <gtest/gtest.h>

#include "shard/engine_options.h"
#include "shard/shard_engine.h"
#include "shardstep/shardstep.h"
#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep {
namespace {

struct MessageCase {
  std::string hosts;  // of the ranks; empty: pairwise
  int ranks;
  int params;
  int buckets;
  std::optional<at::ScalarType> gradient_dtype = std::nullopt;
};

// What each rank sends in its second step, of parameters with 64 Ki elements together.
std::vector<int64_t> messages_of(const MessageCase& c) {
  const test::Hosts hosts(c.hosts);
  std::vector<int64_t> messages(c.ranks);
  test::run_ranks(c.ranks, [&](const ProcessGroupPtr& group) {
    std::vector<at::Tensor> params;
    for (int i = 0; i < c.params; ++i) {
      params.push_back(torch::ones({65536 / c.params}).requires_grad_());
    }
    const auto options =
        ZeroOptions()
            .stage(2)
            .process_group(group)
            .sharding(Sharding::kElement)
            .exchange(c.hosts.empty() ? ExchangeKind::kPairwise : ExchangeKind::kHierarchical)
            .gradient_dtype(c.gradient_dtype)
            .bucket_cap_mb(0.25 / c.buckets);
    ZeroRedundancyOptimizer zero(params, torch::optim::SGDOptions(1e-2), options);
    EXPECT_EQ(zero.stats().buckets, c.buckets);
    for (int step = 0; step < 2; ++step) {
      const int64_t before = zero.engine().traffic().messages_sent;
      zero.zero_grad();
      auto loss = torch::zeros({});
      for (const auto& param : params) loss = loss + param.square().sum();
      loss.backward();
      zero.step();
      messages[group->getRank()] = zero.engine().traffic().messages_sent - before;
    }
  });
  return messages;
}

TEST(Messages, GrowWithHostsAndBucketsAndNothingElse) {
  struct Layout {
    std::string hosts;
    int ranks;
    int64_t peers;  // to which a rank sends its part of a bucket
  };
  for (const auto& [hosts, ranks, peers] :
       {Layout{"a,a,b,b", 4, 1}, Layout{"a,a,b,b,c,c", 6, 2}, Layout{"", 3, 2}}) {
    SCOPED_TRACE(hosts);
    const auto few = messages_of({hosts, ranks, 16, 1});
    EXPECT_EQ(messages_of({hosts, ranks, 128, 1}), few);
    const auto buckets = messages_of({hosts, ranks, 16, 4});
    const auto narrow = messages_of({hosts, ranks, 16, 4, at::kChar});
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(buckets[rank] - few[rank], 3 * peers) << "rank " << rank;
      EXPECT_EQ(narrow[rank], buckets[rank]) << "rank " << rank;
    }
  }
}

TEST(Messages, HaveAQuarterOfAMebibyteByTheRuleForBuckets) {
  EXPECT_EQ(default_bucket_cap_mb(2), 25);
  EXPECT_EQ(default_bucket_cap_mb(100), 25);
  EXPECT_EQ(default_bucket_cap_mb(200), 50);
  EXPECT_EQ(default_bucket_cap_mb(100000), 256);
  // Without bucket_cap_mb, two parameters of 20 MiB have a bucket each.
  test::run_ranks(2, [](const ProcessGroupPtr& group) {
    const auto buckets_with = [&](std::optional<double> cap) {
      std::vector<at::Tensor> params;
      for (int i = 0; i < 2; ++i) params.push_back(torch::empty({5 << 20}).requires_grad_());
      return ZeroRedundancyOptimizer(params, torch::optim::SGDOptions(1e-2),
                                     ZeroOptions().stage(2).process_group(group).bucket_cap_mb(cap))
          .stats()
          .buckets;
    };
    EXPECT_EQ(buckets_with(std::nullopt), 2);
    EXPECT_EQ(buckets_with(100), 1);
    EXPECT_EQ(buckets_with(0), 1);
  });
}

}  // namespace
}  // namespace shardstep
