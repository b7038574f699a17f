#include "comm/exchange.h"

#include <gtest/gtest.h>

#include <set>

#include "comm/make_exchange.h"
#include "support/device.h"
#include "support/full_run.h"
#include "support/test_support.h"
#include "support/torch.h"

namespace shardstep {
namespace {

// One tensor per rank and size; the values identify the rank. `equal` makes them adjacent.
Parts make_parts(int world_size, int64_t size, bool equal, int seed) {
  const auto random = test::generator(seed);
  Parts parts(world_size);
  if (equal) {
    const auto flat = test::on_device(torch::randn({world_size * size}, random));
    for (int rank = 0; rank < world_size; ++rank) {
      if (size > 0) parts[rank].push_back(flat.narrow(0, rank * size, size));
    }
  } else {
    for (int rank = 0; rank < world_size; ++rank) {
      for (int i = 0; i <= rank; ++i) {
        parts[rank].push_back(test::on_device(torch::randn({size + i}, random)));
      }
    }
  }
  return parts;
}

MessageTag bucket(int number) { return MessageTag::bucket(number); }

class ExchangeTest : public testing::TestWithParam<std::tuple<ExchangeKind, int>> {
 protected:
  void SetUp() override {
    if (test::on_sim_device() && std::get<0>(GetParam()) != ExchangeKind::kNative) {
      GTEST_SKIP() << "only the native exchange moves tensors of a device";
    }
  }

  // Calls `body` on every rank, for parts of several sizes, side by side and apart.
  template <class Body>
  void for_all_parts(Body body) {
    const auto [kind, world_size] = GetParam();
    test::run_ranks(world_size, [&, kind = kind](const ProcessGroupPtr& group) {
      auto exchange = make_exchange(group, {.kind = kind, .device = test::device(), .channel = 3});
      for (int64_t size : {0, 1, 1000}) {
        for (bool equal : {false, true}) body(*exchange, group->getRank(), size, equal);
      }
    });
  }
};

TEST_P(ExchangeTest, AllGatherBringsEveryOwnersParts) {
  const int world_size = std::get<1>(GetParam());
  for_all_parts([&](Exchange& exchange, int self, int64_t size, bool equal) {
    auto parts = make_parts(world_size, size, equal, self);
    exchange.all_gather(parts, bucket(0))->wait();
    for (int owner = 0; owner < world_size; ++owner) {
      const auto expected = make_parts(world_size, size, equal, owner);
      for (size_t i = 0; i < parts[owner].size(); ++i) {
        EXPECT_TRUE(at::equal(parts[owner][i], expected[owner][i]));
      }
    }
  });
}

// Sizes around those of the pieces that shared memory moves, and rounds of different length.
TEST_P(ExchangeTest, ManyBucketsReachEveryone) {
  const int world_size = std::get<1>(GetParam());
  for_all_parts([&](Exchange& exchange, int self, int64_t size, bool equal) {
    const int count = world_size > 4 ? test::rounds(2, 4) : 4;
    for (int round = 0; round < count; ++round) {
      const auto make = [&](int rank) {
        std::vector<Parts> buckets;
        for (int64_t extra : {int64_t{0}, round * size * 70, int64_t{1}}) {
          buckets.push_back(make_parts(world_size, size + extra, equal, 10 * rank + round));
        }
        return buckets;
      };
      auto buckets = make(self);
      std::vector<const Parts*> pointers;
      for (const auto& bucket : buckets) pointers.push_back(&bucket);
      exchange.all_gather_and_wait(pointers);
      for (int owner = 0; owner < world_size; ++owner) {
        const auto expected = make(owner);
        for (size_t b = 0; b < buckets.size(); ++b) {
          for (size_t i = 0; i < buckets[b][owner].size(); ++i) {
            EXPECT_TRUE(at::equal(buckets[b][owner][i], expected[b][owner][i]));
          }
        }
      }
    }
  });
}

TEST_P(ExchangeTest, ReduceScatterAddsUpOnTheOwner) {
  const auto [kind, world_size] = GetParam();
  for_all_parts([&, kind = kind, world_size = world_size](Exchange& exchange, int self,
                                                          int64_t size, bool equal) {
    auto parts = make_parts(world_size, size, equal, self);
    exchange.reduce_scatter(parts, bucket(0))->wait();
    std::vector<Parts> given;
    for (int rank = 0; rank < world_size; ++rank) {
      given.push_back(make_parts(world_size, size, equal, rank));
    }
    for (size_t i = 0; i < parts[self].size(); ++i) {
      auto sum = given[0][self][i].clone();
      for (int rank = 1; rank < world_size; ++rank) sum.add_(given[rank][self][i]);
      if (kind != ExchangeKind::kNative) {
        EXPECT_TRUE(at::equal(parts[self][i], sum)) << "expected the bits of a sum in rank order";
      } else {
        // The backend adds in an order of its own.
        EXPECT_TRUE(at::allclose(parts[self][i], sum, 1e-5, 1e-6));
      }
    }
    // What others own is theirs to change.
    for (int other = 0; other < world_size; ++other) {
      if (other == self) continue;
      for (size_t i = 0; i < parts[other].size(); ++i) {
        EXPECT_TRUE(at::equal(parts[other][i], given[self][other][i]));
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, ExchangeTest,
                         testing::Combine(testing::Values(ExchangeKind::kNative,
                                                          ExchangeKind::kPairwise,
                                                          ExchangeKind::kSharedMemory),
                                          testing::Values(2, 3, 4, 7)));

TEST(Exchange, GatherReachesOneRank) {
  test::run_ranks(3, [](const ProcessGroupPtr& group) {
    auto exchange = make_exchange(group, {.kind = ExchangeKind::kAuto, .channel = 0});
    const int self = group->getRank();
    Parts into(3);
    if (self == 2) {
      for (int rank = 0; rank < 2; ++rank)
        into[rank] = {torch::zeros({rank + 1}), torch::zeros({0})};
    }
    const std::vector<at::Tensor> own{torch::full({self + 1}, self + 5.0), torch::zeros({0})};
    exchange->gather(own, into, 2, bucket(1))->wait();
    if (self == 2) {
      for (int rank = 0; rank < 2; ++rank) {
        EXPECT_TRUE(at::equal(into[rank][0], torch::full({rank + 1}, rank + 5.0)));
      }
    }
    EXPECT_EQ(exchange->traffic().bytes_sent, self == 2 ? 0 : 4 * (self + 1));
    EXPECT_EQ(exchange->traffic().bytes_received, self == 2 ? 12 : 0);
  });
}

class AnyOrder : public testing::TestWithParam<ExchangeKind> {};
INSTANTIATE_TEST_SUITE_P(All, AnyOrder,
                         testing::Values(ExchangeKind::kPairwise, ExchangeKind::kSharedMemory));

TEST_P(AnyOrder, BucketsMayStartAndFinishAsTheyLike) {
  test::run_ranks(3, [](const ProcessGroupPtr& group) {
    auto exchange = make_exchange(group, {.kind = GetParam(), .channel = 0});
    const int self = group->getRank();
    constexpr int kBuckets = 6;
    std::vector<Parts> buckets(kBuckets);
    for (auto& parts : buckets) {
      for (int rank = 0; rank < 3; ++rank) parts.push_back({torch::full({100}, self)});
    }
    // Every rank starts and ends at another bucket.
    std::vector<std::unique_ptr<Pending>> pending;
    for (int i = 0; i < kBuckets; ++i) {
      const int number = (i * 5 + self * 2) % kBuckets;
      pending.push_back(exchange->all_gather(buckets[number], bucket(number)));
    }
    std::reverse(pending.begin(), pending.end());
    for (auto& one : pending) one->wait();
    for (auto& parts : buckets) {
      for (int rank = 0; rank < 3; ++rank) {
        EXPECT_TRUE(at::equal(parts[rank][0], torch::full({100}, rank)));
      }
    }
  });
}

// Sums of 16 MiB per rank, more than all slots of shared memory hold.
class SumsOfAnyOrder : public testing::TestWithParam<ExchangeKind> {
 protected:
  static constexpr int kRanks = 3;
  static constexpr int64_t kNumel = 4 << 20;

  void run(const std::function<void(Exchange&, int)>& body) {
    const test::Hosts hosts(GetParam() == ExchangeKind::kHierarchical ? "a,a,b" : "a");
    test::run_ranks(kRanks, [&](const ProcessGroupPtr& group) {
      const auto exchange = make_exchange(group, {.kind = GetParam(), .channel = 0});
      body(*exchange, group->getRank());
      group->barrier()->wait();  // what a rank sends may arrive after its own sum
    });
  }
  static std::unique_ptr<Reduction> make_reduction(Exchange& exchange, int number) {
    return exchange.make_reduction({.numel = std::vector<int64_t>(kRanks, kNumel),
                                    .tensor = at::kFloat,
                                    .tag = {MessageKind::kGradients, number}});
  }
  static void expect(Reduction& reduction) {
    reduction.expect(Parts(kRanks, {at::empty({kNumel}, at::kMeta)}));
  }
  static void post(Reduction& reduction, double value) {
    Parts parts(kRanks);
    for (auto& part : parts) part.push_back(torch::full({kNumel}, value));
    reduction.post(std::move(parts), false);
  }
  static void expect_sum(Reduction& reduction, double value) {
    EXPECT_TRUE(at::equal(reduction.finish(), torch::full({kNumel}, value)));
  }
};
INSTANTIATE_TEST_SUITE_P(All, SumsOfAnyOrder,
                         testing::Values(ExchangeKind::kPairwise, ExchangeKind::kSharedMemory,
                                         ExchangeKind::kHierarchical));

// As Join's announcement, or a barrier of the user's, before the sums are taken.
TEST_P(SumsOfAnyOrder, AreTakenWhileOtherRanksAreInACollectiveThatIsNotOurs) {
  run([](Exchange& exchange, int self) {
    const auto reduction = make_reduction(exchange, 0);
    for (int absent : {2, 0}) {
      post(*reduction, self + 1);
      const auto barrier = [&] { exchange.process_group()->barrier()->wait(); };
      if (self != absent) barrier();
      expect_sum(*reduction, 1 + 2 + 3);
      if (self == absent) barrier();
    }
  });
}

// A rank that threw in its forward pass, or froze a bucket, starts it later.
TEST_P(SumsOfAnyOrder, AreNotHeldUpByOneThatARankHasNotStarted) {
  run([](Exchange& exchange, int self) {
    const auto first = make_reduction(exchange, 0), second = make_reduction(exchange, 1);
    if (self != 1) post(*first, self + 1);
    post(*second, self + 10);
    expect_sum(*second, 10 + 11 + 12);
    exchange.process_group()->barrier()->wait();
    if (self == 1) post(*first, self + 1);
    expect_sum(*first, 1 + 2 + 3);
  });
}

TEST_P(SumsOfAnyOrder, AreTheSameWhereRanksHaveExpectedThem) {
  run([](Exchange& exchange, int self) {
    const auto first = make_reduction(exchange, 0), second = make_reduction(exchange, 1);
    for (int expects : {0, 1, 2}) {
      if (self >= expects) expect(*second);
      if (self <= expects) expect(*first);
      post(*first, self + 1);
      post(*second, self + 10);
      expect_sum(*second, 10 + 11 + 12);
      expect_sum(*first, 1 + 2 + 3);
    }
  });
}

// As an optimizer that is dropped in the middle of a backward pass.
TEST_P(SumsOfAnyOrder, ThatWereExpectedAndNeverPostedLeaveTheGroupUsable) {
  run([](Exchange& exchange, int self) {
    const auto other = make_reduction(exchange, 1);
    {
      const auto dropped = make_reduction(exchange, 0);
      expect(*dropped);
      if (self == 0) post(*dropped, 1);
    }
    exchange.process_group()->barrier()->wait();
    post(*other, self + 1);
    expect_sum(*other, 1 + 2 + 3);
  });
}

TEST(Exchange, CountsTwoShardsLessOwnOnTheWire) {
  test::run_ranks(4, [](const ProcessGroupPtr& group) {
    auto exchange = make_exchange(group, {.kind = ExchangeKind::kPairwise, .channel = 0});
    auto parts = make_parts(4, 10, true, 0);
    exchange->all_gather(parts, bucket(0))->wait();
    EXPECT_EQ(exchange->traffic().bytes_sent, 3 * 40);
    EXPECT_EQ(exchange->traffic().bytes_received, 3 * 40);
  });
}

TEST(MessageTag, DiffersByKindAndNumber) {
  std::set<int> values;
  for (auto kind :
       {MessageKind::kBucket, MessageKind::kPartialStep, MessageKind::kReduceToOwners}) {
    for (int number : {0, 1, 0x3fff, 0x4000, 0x7fff, 0x8000, 0xffff}) {
      values.insert(MessageTag(kind, number).value());
    }
  }
  for (auto message : {ControlMessage::kStepOutcome, ControlMessage::kGradientMeeting,
                       ControlMessage::kLentGradients, ControlMessage::kParamStatus,
                       ControlMessage::kStateSizes, ControlMessage::kStateCatalogues}) {
    values.insert(MessageTag(message).value());
  }
  EXPECT_EQ(values.size(), 3 * 7 + 6);
  EXPECT_GE(*values.begin(), 0);
  EXPECT_LT(*values.rbegin(), 1 << MessageTag::kBits);
}

TEST(MessageTag, RefusesWhatDoesNotFit) {
  EXPECT_THROW(MessageTag::bucket(0x10000), c10::ValueError);
  EXPECT_THROW(MessageTag::bucket(-1), c10::ValueError);
}

TEST(Exchange, AutoSharesMemoryOnOneHost) {
  test::run_ranks(2, [](const ProcessGroupPtr& group) {
    EXPECT_STREQ(make_exchange(group, {.kind = ExchangeKind::kAuto, .channel = 0})->name(),
                 "shared_memory");
    EXPECT_STREQ(make_exchange(group, {.kind = ExchangeKind::kNative, .channel = 0})->name(),
                 "native");
  });
}

TEST(Exchange, AbsentRankIsNamedWithinTheTimeout) {
  test::run_ranks(
      2,
      [](const ProcessGroupPtr& group) {
        if (group->getRank() == 1) return;
        auto exchange = make_exchange(group, {.kind = ExchangeKind::kPairwise, .channel = 0});
        auto parts = make_parts(2, 10, true, 0);
        try {
          exchange->all_gather(parts, bucket(0))->wait();
          FAIL() << "expected an error";
        } catch (const std::exception& error) {
          EXPECT_NE(std::string(error.what()).find("rank 1 (rank 0 of 2)"), std::string::npos)
              << error.what();
        }
      },
      std::chrono::seconds(60), std::chrono::seconds(4));
}

}  // namespace
}  // namespace shardstep
