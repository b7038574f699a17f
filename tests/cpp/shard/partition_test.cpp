#include "shard/partition.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

namespace shardstep {
namespace {

std::vector<ParamSpec> specs(const std::vector<int64_t>& sizes, int64_t kind = 0) {
  std::vector<ParamSpec> out;
  for (int64_t size : sizes) out.push_back({size, 4, kind});
  return out;
}

// What must hold for every partition.
void check(const Partition& partition, const std::vector<int64_t>& sizes) {
  ASSERT_EQ(partition.param_count(), static_cast<int64_t>(sizes.size()));
  for (int64_t param = 0; param < partition.param_count(); ++param) {
    // The slices of a parameter are adjacent, in rank order, and cover it.
    const auto& slices = partition.slices(param);
    ASSERT_FALSE(slices.empty());
    int64_t at = 0;
    int last_rank = -1;
    for (const auto& slice : slices) {
      EXPECT_EQ(slice.param, param);
      EXPECT_EQ(slice.elements.begin, at);
      EXPECT_GT(slice.rank, last_rank);
      at = slice.elements.end;
      last_rank = slice.rank;
      // At the slice's offset the bucket has the parameter, in its owner's shard.
      const auto& bucket = partition.buckets()[slice.bucket];
      const Range in_bucket{slice.offset, slice.offset + slice.elements.size()};
      if (!in_bucket.empty()) {
        EXPECT_EQ(intersect(bucket.shards[slice.rank], in_bucket), in_bucket);
      }
    }
    EXPECT_EQ(at, sizes[param]);
    if (partition.sharding() == Sharding::kParameter) {
      EXPECT_EQ(slices.size(), 1u);
    }
  }
  int64_t owned = 0;
  for (int rank = 0; rank < partition.world_size(); ++rank) owned += partition.owned_elements(rank);
  EXPECT_EQ(owned, std::accumulate(sizes.begin(), sizes.end(), int64_t{0}));
  for (const auto& bucket : partition.buckets()) {
    int64_t at = 0;
    for (const auto& shard : bucket.shards) {
      EXPECT_EQ(shard.begin, at);
      at = shard.end;
      if (partition.sharding() == Sharding::kElement) {
        EXPECT_EQ(shard.size(), bucket.shards[0].size());
      }
    }
    at = 0;
    // By element, slots and shards start at 64 byte lines: 16 elements of 4 bytes.
    const int64_t line = partition.sharding() == Sharding::kElement ? 16 : 1;
    for (const auto& slot : bucket.slots) {
      EXPECT_EQ(slot.range.begin, (at + line - 1) / line * line);
      EXPECT_EQ(slot.range.size(), sizes[slot.param]);
      at = slot.range.end;
    }
    EXPECT_EQ(bucket.shards[0].size() % line, 0);
    EXPECT_LE(at, bucket.numel());
    if (partition.sharding() == Sharding::kElement) {
      EXPECT_LE(bucket.numel() - at, partition.world_size() * line);
    } else {
      EXPECT_EQ(bucket.numel(), at);
    }
  }
}

TEST(Partition, ByParameterIsSortedGreedy) {
  // Four sizes, once per rank: every rank gets one of each.
  for (int world_size = 1; world_size <= 9; ++world_size) {
    std::vector<int64_t> sizes;
    for (int i = 0; i < world_size; ++i) sizes.insert(sizes.end(), {9, 7, 5, 3});
    Partition partition(Sharding::kParameter, world_size);
    partition.add_groups({specs(sizes)});
    for (int rank = 0; rank < world_size; ++rank) EXPECT_EQ(partition.owned_elements(rank), 24);
    check(partition, sizes);
  }
}

TEST(Partition, ByParameterCarriesSizesAcrossGroups) {
  Partition partition(Sharding::kParameter, 2);
  partition.add_groups({specs({10}), specs({4, 3})});
  EXPECT_EQ(partition.slices(0)[0].rank, 0);
  EXPECT_EQ(partition.slices(1)[0].rank, 1);
  EXPECT_EQ(partition.slices(2)[0].rank, 1);
  // A later group is added, and moves nothing.
  partition.add_groups({specs({2, 2})});
  EXPECT_EQ(partition.slices(0)[0].rank, 0);
  EXPECT_EQ(partition.slices(3)[0].rank, 1);
  EXPECT_EQ(partition.slices(4)[0].rank, 1);
  check(partition, {10, 4, 3, 2, 2});
}

TEST(Partition, ByParameterDividesEveryPoolByItself) {
  Partition partition(Sharding::kParameter, 2);
  std::vector<ParamSpec> group{{1000, 4, 0, /*pool=*/1}};
  for (int i = 0; i < 8; ++i) group.push_back({10, 4, 0, /*pool=*/0});
  partition.add_groups({group});
  EXPECT_EQ(partition.owned_elements(0), 1040);
  EXPECT_EQ(partition.owned_elements(1), 40);
}

TEST(Partition, ByElementCutsThroughParameters) {
  Partition partition(Sharding::kElement, 2);
  partition.add_groups({specs({3, 50})});
  EXPECT_EQ(partition.slices(0).size(), 1u);
  ASSERT_EQ(partition.slices(1).size(), 2u);
  EXPECT_EQ(partition.slices(1)[0].elements, (Range{0, 32}));
  EXPECT_EQ(partition.slices(1)[1].elements, (Range{32, 50}));
}

TEST(Partition, ByElementBalancesManySmallGroups) {
  // One bucket spans the groups of a call, so that leftovers do not pile up on one rank.
  Partition partition(Sharding::kElement, 4);
  partition.add_groups(std::vector<std::vector<ParamSpec>>(100, specs({1})));
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(partition.owned_elements(rank), 25);
}

TEST(Partition, ByElementIsEvenWithinACacheLinePerRank) {
  for (int world_size = 1; world_size <= 9; ++world_size) {
    Partition partition(Sharding::kElement, world_size);
    partition.add_groups({specs({4000000, 2000, 1, 999999})});
    for (int rank = 0; rank + 1 < world_size; ++rank) {
      EXPECT_NEAR(partition.owned_elements(rank), partition.owned_elements(world_size - 1),
                  16 * (world_size + 4));
    }
  }
}

TEST(Partition, KindsDoNotShareABucket) {
  Partition partition(Sharding::kElement, 2);
  std::vector<ParamSpec> mixed{{4, 4, 0}, {4, 4, 1}, {4, 4, 0}};
  partition.add_groups({mixed});
  ASSERT_EQ(partition.buckets().size(), 2u);
  EXPECT_EQ(partition.buckets()[0].slots.size(), 2u);
  EXPECT_EQ(partition.buckets()[1].slots.size(), 1u);
  check(partition, {4, 4, 4});
}

TEST(Partition, BucketCapKeepsParametersWhole) {
  Partition partition(Sharding::kElement, 2, /*bucket_cap_bytes=*/40);
  partition.add_groups({specs({4, 4, 4, 100, 1})});
  ASSERT_EQ(partition.buckets().size(), 4u);
  EXPECT_EQ(partition.buckets()[0].slots.size(), 2u);
  EXPECT_EQ(partition.buckets()[2].slots[0].range.size(), 100);
  check(partition, {4, 4, 4, 100, 1});
}

TEST(Partition, HoldsForRandomModels) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    const auto sharding = round % 2 == 0 ? Sharding::kParameter : Sharding::kElement;
    const int world_size = 1 + static_cast<int>(random() % 9);
    const int64_t cap = std::vector<int64_t>{0, 1, 64, 4096}[random() % 4];
    Partition partition(sharding, world_size, cap);
    std::vector<int64_t> sizes;
    for (int call = 0; call < 2; ++call) {
      std::vector<std::vector<ParamSpec>> groups(1 + random() % 3);
      for (auto& group : groups) {
        for (size_t i = random() % 8; i > 0; --i) {
          sizes.push_back(std::vector<int64_t>{0, 1, 2, 17, 1000}[random() % 5]);
          group.push_back({sizes.back(), 4, static_cast<int64_t>(random() % 2)});
        }
      }
      partition.add_groups(groups);
    }
    check(partition, sizes);
    if (HasFailure()) FAIL() << "round " << round;
  }
}

TEST(Partition, RefusesNonsense) {
  EXPECT_ANY_THROW(Partition(Sharding::kElement, 0));
  EXPECT_ANY_THROW(Partition(Sharding::kElement, 1, -1));
}

}  // namespace
}  // namespace shardstep
