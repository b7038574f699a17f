// Hosts are made by SHARDSTEP_TEST_HOSTS: ranks of different ones do not share memory.

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "comm/errands.h"
#include "comm/make_exchange.h"
#include "support/full_run.h"
#include "support/test_support.h"
#include "support/torch.h"

namespace shardstep {
namespace {

using detail::Errand;

TEST(Hosts, AreThoseThatCanOpenEachOthersMemory) {
  const auto hosts = detail::group_by_host({{true, false, true, true},
                                            {false, true, false, false},
                                            {true, false, true, false},
                                            {true, false, true, true}});
  // Rank 2 cannot open rank 3's.
  EXPECT_EQ(hosts.ranks, (std::vector<std::vector<int>>{{0, 2}, {1}, {3}}));
  EXPECT_EQ(hosts.of(2), 0);
  EXPECT_FALSE(hosts.every_rank_is_alone());
}

// Every element that another host owns has one speaker on each host, and speakers share evenly.
TEST(Errands, CoverWhatOthersOwnOnceAndEvenly) {
  for (int seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    const int ranks = 1 + static_cast<int>(random() % 9);
    detail::Hosts hosts;
    std::vector<int64_t> owned;
    for (int rank = 0; rank < ranks; ++rank) {
      const size_t host = random() % (hosts.count() + 1);
      if (host == hosts.count()) hosts.ranks.emplace_back();
      hosts.ranks[host].push_back(rank);
      owned.push_back(static_cast<int64_t>(random() % 3 == 0 ? 0 : random() % 5000));
    }
    const int64_t grain = 1 + static_cast<int64_t>(random() % 16), margin = 100;
    for (size_t host = 0; host < hosts.count(); ++host) {
      const auto& speakers = hosts.ranks[host];
      std::vector<std::vector<int>> covered;
      for (int64_t size : owned) covered.emplace_back(size, 0);
      std::vector<int64_t> work(ranks);
      int64_t total = 0;
      for (const auto& errand : errands_of_host(hosts, host, owned, grain, margin)) {
        EXPECT_EQ(std::count(speakers.begin(), speakers.end(), errand.speaker), 1);
        EXPECT_GT(errand.size(), 0);
        work[errand.speaker] += errand.size();
        total += errand.size();
        for (int64_t i = errand.begin; i < errand.end; ++i) ++covered[errand.owner][i];
      }
      for (int rank = 0; rank < ranks; ++rank) {
        const bool is_remote = hosts.of(rank) != host;
        for (int count : covered[rank]) ASSERT_EQ(count, is_remote ? 1 : 0) << "seed " << seed;
      }
      const auto even = total / static_cast<int64_t>(speakers.size());
      for (int speaker : speakers) {
        EXPECT_NEAR(static_cast<double>(work[speaker]), static_cast<double>(even),
                    static_cast<double>(2 * (margin + grain) + speakers.size()))
            << "seed " << seed;
      }
    }
  }
}

std::vector<std::string> host_layouts() {
  const std::vector<std::string> all{"a,b",   "a,a",     "a,a,b",     "a,b,a",
                                     "a,b,c", "a,a,b,b", "a,b,b,a,c", "a,a,a,b,b,c"};
  return test::sample(all, 3);
}

int ranks_of(const std::string& hosts) { return static_cast<int>(hosts.size() + 1) / 2; }

// Parts of many sizes for one rank, from none to more than a piece.
Parts make_host_parts(int world_size, int seed, at::ScalarType dtype = at::kFloat) {
  const auto random = test::generator(seed);
  Parts parts(world_size);
  for (int owner = 0; owner < world_size; ++owner) {
    for (int64_t size : {0, 1, 77, 3000, owner * 40000}) {
      parts[owner].push_back(torch::randn({size + owner}, random).to(dtype));
    }
  }
  return parts;
}

class HierarchicalTest : public testing::TestWithParam<std::string> {
 protected:
  void run(const std::function<void(Exchange&, int)>& body) {
    const test::Hosts hosts(GetParam());
    test::run_ranks(ranks_of(GetParam()), [&](const ProcessGroupPtr& group) {
      const auto exchange = make_exchange(group, {.kind = ExchangeKind::kHierarchical});
      body(*exchange, group->getRank());
    });
  }
  int ranks() const { return ranks_of(GetParam()); }

  // The sum that is documented: over the hosts, of the sums of their ranks as they are sent.
  at::Tensor sum_of(const std::vector<at::Tensor>& by_rank,
                    std::optional<at::ScalarType> wire = std::nullopt) {
    const auto hosts = test::ranks_by_host(GetParam(), ranks());
    at::Tensor sum;
    for (const auto& host : hosts) {
      at::Tensor of_host;
      for (int rank : host) {
        of_host = of_host.defined() ? of_host + by_rank[rank] : by_rank[rank];
      }
      if (hosts.size() > 1) of_host = test::as_sent(of_host, wire);
      sum = sum.defined() ? sum + of_host : of_host;
    }
    return sum;
  }
};
INSTANTIATE_TEST_SUITE_P(Hosts, HierarchicalTest, testing::ValuesIn(host_layouts()));

void expect_gathered(const Parts& parts, const std::function<Parts(int)>& given) {
  for (size_t owner = 0; owner < parts.size(); ++owner) {
    const auto expected = given(static_cast<int>(owner));
    for (size_t i = 0; i < parts[owner].size(); ++i) {
      ASSERT_TRUE(at::equal(parts[owner][i], expected[owner][i])) << owner << " " << i;
    }
  }
}

TEST_P(HierarchicalTest, AllGatherBringsEveryOwnersParts) {
  run([&](Exchange& exchange, int self) {
    for (int round = 0; round < 3; ++round) {
      const auto make = [&](int rank) { return make_host_parts(ranks(), 10 * rank + round); };
      const auto parts = make(self);
      exchange.all_gather(parts, MessageTag::bucket(round % 2))->wait();
      expect_gathered(parts, make);
    }
  });
}

TEST_P(HierarchicalTest, ManyBucketsOfManyDtypesReachEveryone) {
  run([&](Exchange& exchange, int self) {
    for (int round = 0; round < 3; ++round) {
      const auto make = [&](int rank, int bucket) {
        const auto dtype = std::vector{at::kFloat, at::kDouble, at::kBFloat16}[bucket];
        return make_host_parts(ranks(), 100 * rank + 10 * bucket + round, dtype);
      };
      std::vector<Parts> buckets;
      std::vector<const Parts*> pointers;
      for (int b = 0; b < 3; ++b) buckets.push_back(make(self, b));
      for (const auto& bucket : buckets) pointers.push_back(&bucket);
      exchange.all_gather_and_wait(pointers);
      for (int b = 0; b < 3; ++b) {
        expect_gathered(buckets[b], [&](int rank) { return make(rank, b); });
      }
    }
  });
}

TEST_P(HierarchicalTest, SumsPerHostAndThenOverHosts) {
  run([&](Exchange& exchange, int self) {
    for (auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
      const auto parts = make_host_parts(ranks(), self, dtype);
      exchange.reduce_scatter(parts, MessageTag::bucket(0), ranks())->wait();
      for (size_t i = 0; i < parts[self].size(); ++i) {
        std::vector<at::Tensor> given;
        for (int rank = 0; rank < ranks(); ++rank) {
          given.push_back(make_host_parts(ranks(), rank, dtype)[self][i]);
        }
        // Narrow ones are summed in float32, and rounded for the way to another host.
        const bool narrow = dtype == at::kBFloat16;
        if (narrow) {
          for (auto& term : given) term = term.to(at::kFloat);
        }
        const auto wire = narrow ? std::optional(dtype) : std::nullopt;
        const auto expected = sum_of(given, wire).div(ranks()).to(dtype);
        ASSERT_TRUE(at::equal(parts[self][i], expected)) << dtype << " " << i;
      }
    }
  });
}

// Every rank starts its buckets in an order of its own, and several rounds follow each other.
TEST_P(HierarchicalTest, ReductionsMayStartAndFinishInAnyOrder) {
  run([&](Exchange& exchange, int self) {
    constexpr int kBuckets = 5;
    std::vector<int64_t> numel;
    for (const auto& part : make_host_parts(ranks(), 0)) {
      numel.push_back(0);
      for (const auto& tensor : part) numel.back() += tensor.numel();
    }
    std::vector<std::unique_ptr<Reduction>> reductions;
    const auto wire_of = [](int b) {
      return std::vector<std::optional<at::ScalarType>>{std::nullopt, at::kBFloat16,
                                                        at::kChar}[b % 3];
    };
    for (int b = 0; b < kBuckets; ++b) {
      reductions.push_back(exchange.make_reduction({.numel = numel,
                                                    .tensor = at::kFloat,
                                                    .wire = wire_of(b),
                                                    .tag = {MessageKind::kGradients, b},
                                                    .divisor = static_cast<double>(ranks())}));
    }
    std::mt19937 random(self);
    std::vector<int> order(kBuckets);
    for (int b = 0; b < kBuckets; ++b) order[b] = b;
    for (int round = 0; round < test::rounds(3, 30); ++round) {
      const auto make = [&](int rank, int b) {
        return make_host_parts(ranks(), 1000 * round + 10 * rank + b);
      };
      std::shuffle(order.begin(), order.end(), random);
      for (int b : order) reductions[b]->post(make(self, b), true);
      std::shuffle(order.begin(), order.end(), random);
      for (int b : order) {
        const auto sum = reductions[b]->finish();
        std::vector<at::Tensor> sums;
        for (size_t i = 0; i < make(self, b)[self].size(); ++i) {
          std::vector<at::Tensor> given;
          for (int rank = 0; rank < ranks(); ++rank) given.push_back(make(rank, b)[self][i]);
          sums.push_back(sum_of(given, wire_of(b)).div(ranks()));
        }
        const auto expected = at::cat(sums);
        ASSERT_TRUE(at::equal(sum, expected)) << "round " << round << " bucket " << b;
        EXPECT_NEAR(*reductions[b]->squares(),
                    expected.to(at::kDouble).square().sum().item<double>(),
                    1e-5 * static_cast<double>(sum.numel() + 1));
      }
    }
  });
}

// Narrow gradients with wide sums, as masters have them: nothing is rounded on the way.
TEST_P(HierarchicalTest, HostsSendSumsInTheDtypeOfTheSum) {
  run([&](Exchange& exchange, int self) {
    std::vector<int64_t> numel;
    for (const auto& part : make_host_parts(ranks(), 0)) {
      numel.push_back(at::cat(part).numel());
    }
    const auto reduction = exchange.make_reduction({.numel = numel,
                                                    .tensor = at::kFloat,
                                                    .posted = at::kBFloat16,
                                                    .tag = {MessageKind::kGradients, 0}});
    reduction->post(make_host_parts(ranks(), self, at::kBFloat16), false);
    std::vector<at::Tensor> given;
    for (int rank = 0; rank < ranks(); ++rank) {
      const auto parts = make_host_parts(ranks(), rank, at::kBFloat16)[self];
      given.push_back(at::cat(parts).to(at::kFloat));
    }
    EXPECT_TRUE(at::equal(reduction->finish(), sum_of(given)));
  });
}

// A meeting of the ranks while a reduction is under way: the other hosts wait for this host's sum.
TEST_P(HierarchicalTest, ARankThatWaitsForSomethingElseGoesOnSumming) {
  run([&](Exchange& exchange, int self) {
    const auto sums = make_host_parts(ranks(), self);
    const auto pending = exchange.reduce_scatter(sums, MessageTag::bucket(0), 1);
    const auto make = [&](int rank) { return make_host_parts(ranks(), 50 + rank); };
    const auto meet = [&] {
      const auto parts = make(self);
      exchange.all_gather(parts, MessageTag::bucket(1))->wait();
      expect_gathered(parts, make);
    };
    // The last rank meets the others only when it has its sum.
    if (self != ranks() - 1) meet();
    pending->wait();
    if (self == ranks() - 1) meet();
  });
}

// Bytes cross a link once per host: what others own, in each direction.
TEST(Hierarchical, SendsEachByteOncePerHost) {
  const test::Hosts hosts("a,a,b,b");
  test::run_ranks(4, [&](const ProcessGroupPtr& group) {
    const auto exchange = make_exchange(group, {.kind = ExchangeKind::kAuto});
    EXPECT_STREQ(exchange->name(), "hierarchical");
    Parts parts(4);
    for (auto& part : parts) part.push_back(torch::ones({100000}));
    exchange->all_gather_and_wait({&parts});
    EXPECT_EQ(exchange->traffic().bytes_sent, 400000);
    EXPECT_EQ(exchange->traffic().bytes_received, 400000);
    exchange->reduce_scatter(parts, MessageTag::bucket(0))->wait();
    EXPECT_EQ(exchange->traffic().bytes_sent, 800000);
    EXPECT_EQ(exchange->traffic().bytes_received, 800000);
  });
}

}  // namespace
}  // namespace shardstep
