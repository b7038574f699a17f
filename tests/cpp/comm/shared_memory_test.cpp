// What the shared-memory exchange promises beyond moving the right bytes: little memory, no
// deadlock, no crash, no busy waiting.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <numeric>
#include <random>
#include <sstream>
#include <thread>

#include "comm/make_exchange.h"
#include "comm/shared/notice_board.h"
#include "comm/shared/segment.h"
#include "support/test_support.h"
#include "support/torch.h"

namespace shardstep {
namespace {

std::unique_ptr<Exchange> shared_exchange(const ProcessGroupPtr& group) {
  return make_exchange(group, {.kind = ExchangeKind::kSharedMemory});
}

// A part of a bucket, for a test that checks every element: exact in float.
at::Tensor part_of(int rank, int64_t numel, int round) {
  return torch::arange(numel, at::kFloat).remainder_(1000).mul_(rank + 1).add_(round);
}

at::Tensor sum_of_parts(int world_size, int64_t numel, int round) {
  const int ranks = world_size * (world_size + 1) / 2;
  return torch::arange(numel, at::kFloat).remainder_(1000).mul_(ranks).add_(world_size * round);
}

// A bucket that is summed repeatedly; `numel` elements per rank, in two tensors.
class TestBucket {
 public:
  TestBucket(Exchange& exchange, const ProcessGroupPtr& group, int64_t numel, int number)
      : rank_(group->getRank()), world_size_(group->getSize()), numel_(numel) {
    reduction_ = exchange.make_reduction({.numel = std::vector<int64_t>(world_size_, numel),
                                          .tensor = at::kFloat,
                                          .tag = MessageTag::bucket(number)});
  }
  void post(int round) {
    Parts parts(world_size_);
    const auto mine = part_of(rank_, numel_, round);
    for (auto& part : parts) {
      part = {mine.narrow(0, 0, numel_ / 3), mine.narrow(0, numel_ / 3, numel_ - numel_ / 3)};
    }
    reduction_->post(std::move(parts), false);
  }
  bool ready() { return reduction_->ready(std::chrono::milliseconds(0)); }
  void finish(int round) {
    EXPECT_TRUE(at::equal(reduction_->finish(), sum_of_parts(world_size_, numel_, round)));
  }

 private:
  int rank_;
  int world_size_;
  int64_t numel_;
  std::unique_ptr<Reduction> reduction_;
};

// Bytes of our shared memory that this process maps, each segment once.
int64_t shared_bytes() {
  std::ifstream maps("/proc/self/maps");
  std::map<std::string, int64_t> by_inode;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/memfd:shardstep") == std::string::npos) continue;
    std::istringstream fields(line);
    std::string range, permissions, offset, device, inode;
    fields >> range >> permissions >> offset >> device >> inode;
    const auto dash = range.find('-');
    const auto size = std::stoull(range.substr(dash + 1), nullptr, 16) -
                      std::stoull(range.substr(0, dash), nullptr, 16);
    auto& bytes = by_inode[inode];
    bytes = std::max(bytes, static_cast<int64_t>(size));
  }
  int64_t bytes = 0;
  for (const auto& [inode, size] : by_inode) bytes += size;
  return bytes;
}

class SharedMemoryWorld : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(SharedMemory, SharedMemoryWorld, testing::Values(2, 4, 8));

TEST_P(SharedMemoryWorld, GradientsTakeSixteenMebibytesPerRank) {
  constexpr int kBuckets = 4;
  constexpr int64_t kBucketBytes = 24 << 20;
  test::run_ranks(GetParam(), [&](const ProcessGroupPtr& group) {
    auto exchange = shared_exchange(group);
    std::vector<std::unique_ptr<TestBucket>> buckets;
    for (int number = 0; number < kBuckets; ++number) {
      buckets.push_back(
          std::make_unique<TestBucket>(*exchange, group, kBucketBytes / 4 / GetParam(), number));
    }
    for (int round = 0; round < 2; ++round) {
      for (auto& bucket : buckets) bucket->post(round);
      for (auto& bucket : buckets) bucket->finish(round);
    }
    // Parameters go back the other way.
    Parts parts(GetParam());
    for (auto& part : parts) part = {torch::zeros({1 << 20})};
    exchange->all_gather_and_wait({&parts});
    group->barrier()->wait();
    EXPECT_GT(shared_bytes(), 0);
    EXPECT_LE(shared_bytes(), GetParam() * (int64_t{16} << 20));
    group->barrier()->wait();
  });
}

// More than there are places for, so that parts are held back on all ranks.
TEST_P(SharedMemoryWorld, RanksMayPostInOppositeOrders) {
  constexpr int kBuckets = 8;
  test::run_ranks(GetParam(), [&](const ProcessGroupPtr& group) {
    auto exchange = shared_exchange(group);
    std::vector<std::unique_ptr<TestBucket>> buckets;
    for (int number = 0; number < kBuckets; ++number) {
      buckets.push_back(
          std::make_unique<TestBucket>(*exchange, group, 3000000 / GetParam() + number, number));
    }
    for (int round = 0; round < 2; ++round) {
      const bool backwards = group->getRank() % 2 == 1;
      for (int i = 0; i < kBuckets; ++i) buckets[backwards ? kBuckets - 1 - i : i]->post(round);
      for (int i = 0; i < kBuckets; ++i) buckets[backwards ? i : kBuckets - 1 - i]->finish(round);
    }
  });
}

TEST(SharedMemory, RandomOrdersSizesAndDelaysChangeNothing) {
  constexpr int kBuckets = 10, kRounds = 8;
  for (int seed = 0; seed < 4; ++seed) {
    SCOPED_TRACE(c10::str("seed ", seed));
    test::run_ranks(2 + seed % 3, [&](const ProcessGroupPtr& group) {
      std::mt19937 same(seed), own(100 * seed + group->getRank());
      auto exchange = shared_exchange(group);
      std::vector<std::unique_ptr<TestBucket>> buckets;
      for (int number = 0; number < kBuckets; ++number) {
        // Empty, small, of several pieces, and larger than all places.
        const int64_t numel = std::vector<int64_t>{0, 1, 1000, 131072, 200001, 1500000}[same() % 6];
        buckets.push_back(std::make_unique<TestBucket>(*exchange, group, numel, number));
      }
      std::vector<int> order(kBuckets);
      for (int round = 0; round < kRounds; ++round) {
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), own);
        for (int number : order) {
          if (own() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 500));
          buckets[number]->post(round);
          if (own() % 2 == 0) buckets[order[0]]->ready();
        }
        std::shuffle(order.begin(), order.end(), own);
        for (int number : order) buckets[number]->finish(round);
      }
    });
  }
}

TEST(SharedMemory, ARankThatGivesUpEndsTheWaitsOfOthers) {
  const std::vector<std::function<void(Exchange&)>> waits{
      [](Exchange& exchange) {
        Parts parts(3, {torch::zeros({4})});
        exchange.all_gather(parts, MessageTag::bucket(0))->wait();
      },
      [](Exchange& exchange) {
        const Parts parts(3, {torch::zeros({4})});
        exchange.all_gather_and_wait({&parts});
      },
      [](Exchange& exchange) {
        Parts parts(3, {torch::zeros({4})});
        exchange.reduce_scatter(parts, MessageTag::bucket(0))->wait();
      }};
  for (const auto& wait : waits) {
    test::run_ranks(3, [&](const ProcessGroupPtr& group) {
      auto exchange = shared_exchange(group);
      if (group->getRank() == 1) {
        exchange->give_up("out of luck");
      } else {
        try {
          wait(*exchange);
          ADD_FAILURE() << "expected an error";
        } catch (const c10::Error& error) {
          EXPECT_NE(std::string(error.what()).find("rank 1 gave up: out of luck"),
                    std::string::npos)
              << error.what();
        }
      }
      group->barrier()->wait();
    });
  }
}

// Rank 0 is ahead by more tags than there are notices.
TEST(SharedMemory, ARankThatIsFarAheadSleeps) {
  constexpr int kTags = detail::NoticeBoard::kNotices + 40;
  test::run_ranks(2, [&](const ProcessGroupPtr& group) {
    auto exchange = shared_exchange(group);
    std::vector<std::unique_ptr<Pending>> pending;
    if (group->getRank() == 1) std::this_thread::sleep_for(std::chrono::seconds(1));
    const auto cpu_time = [] {
      timespec time{};
      ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
      return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
    };
    const double begin = cpu_time();
    for (int tag = 0; tag < kTags; ++tag) {
      pending.push_back(
          exchange->all_gather(Parts(2, {torch::zeros({1})}), MessageTag::bucket(tag)));
    }
    if (group->getRank() == 0) {
      EXPECT_LT(cpu_time() - begin, 0.5);
    }
    for (auto& one : pending) one->wait();
  });
}

class SegmentTest : public testing::Test {
 protected:
  const detail::SegmentLayout layout_{100, {5000, 5000}};
  detail::SegmentOffer offer_;
  detail::Segment made_ = detail::make_segment(layout_, offer_);
};

TEST_F(SegmentTest, WhatIsOfferedCanBeOpened) {
  ASSERT_TRUE(made_);
  const auto opened = detail::open_segment(offer_, layout_);
  ASSERT_TRUE(opened);
  EXPECT_EQ(opened.reserve(layout_.begin(1), layout_.end(1)), 0);
  opened.memory.get()[layout_.begin(1)] = std::byte{42};
  EXPECT_EQ(made_.memory.get()[layout_.begin(1)], std::byte{42});
}

// As where processes of two containers have the same number.
TEST_F(SegmentTest, AnotherFileUnderTheOfferedNumberIsRefused) {
  const auto refuse = [&](int fd) {
    auto other = offer_;
    other.descriptor = fd;
    EXPECT_FALSE(detail::open_segment(other, layout_)) << "descriptor " << fd;
    ::close(fd);
  };
  FILE* const small = std::tmpfile();
  refuse(::dup(::fileno(small)));
  std::fclose(small);
  refuse(::memfd_create("shardstep", 0));
  refuse(::memfd_create("another", 0));
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  refuse(ends[0]);
  refuse(ends[1]);
  refuse(12345);
  // The right name and too few bytes.
  const auto name = c10::str("shardstep-", static_cast<uint64_t>(offer_.mark));
  refuse(::memfd_create(name.c_str(), 0));
  // The right name and size, and no mark.
  const int unmarked = ::memfd_create(name.c_str(), 0);
  ASSERT_EQ(::ftruncate(unmarked, layout_.bytes() + 64), 0);
  refuse(unmarked);
}

TEST_F(SegmentTest, AnOfferOfAnotherSegmentIsRefused) {
  detail::SegmentOffer other;
  const auto segment = detail::make_segment(layout_, other);
  other.mark = offer_.mark;
  EXPECT_FALSE(detail::open_segment(other, layout_));
  EXPECT_FALSE(detail::open_segment(offer_, detail::SegmentLayout(100, {5000})));
}

class NoticeBoardTest : public testing::Test {
 protected:
  static bool nobody(int) { return false; }
  detail::NoticeBoard board_{};
};

TEST_F(NoticeBoardTest, IsHeldByOneRankAndFreeAfterAnException) {
  try {
    const detail::NoticeBoardLock first(board_, 0, nobody);
    EXPECT_TRUE(first.held());
    const detail::NoticeBoardLock second(board_, 1, nobody);
    EXPECT_FALSE(second.held());
    throw std::bad_alloc();
  } catch (const std::bad_alloc&) {
  }
  EXPECT_TRUE(detail::NoticeBoardLock(board_, 1, nobody).held());
}

TEST_F(NoticeBoardTest, ADeadRankLosesIt) {
  board_.holder = 3;  // rank 2
  EXPECT_FALSE(detail::NoticeBoardLock(board_, 0, nobody).held());
  const detail::NoticeBoardLock lock(board_, 0, [](int rank) { return rank == 2; });
  EXPECT_TRUE(lock.held());
}

}  // namespace
}  // namespace shardstep
