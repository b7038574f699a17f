#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "shardstep/distributed_data_parallel.h"
#include "shardstep/process_group.h"
#include "shardstep/zero_redundancy_optimizer.h"
#include "support/test_support.h"
#include "support/torch.h"

namespace shardstep {
namespace {

using std::chrono::milliseconds;

double sum_over(const ProcessGroupPtr& group, double value) {
  std::vector<at::Tensor> tensors{at::full({4}, value)};
  group->allreduce(tensors)->wait();
  return tensors[0][3].item<double>();
}

ProcessGroupOptions gloo() {
  return ProcessGroupOptions().backend("gloo").timeout(std::chrono::seconds(20));
}

// What `call` throws, or "" if nothing.
template <typename Error, typename Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(ProcessGroup, RanksAsThreadsSum) {
  for (int size = 1; size <= 5; ++size) {
    test::run_ranks(size, [size](const ProcessGroupPtr& group) {
      EXPECT_EQ(group->getSize(), size);
      EXPECT_EQ(sum_over(group, group->getRank() + 1.0), size * (size + 1) / 2.0);
    });
  }
}

TEST(ProcessGroup, RefusesImpossibleArguments) {
  test::run_ranks(1, [](const ProcessGroupPtr& group) {
    auto store = group->getStore();
    EXPECT_THROW(make_process_group(store, 2, 2, gloo()), c10::ValueError);
    EXPECT_THROW(make_process_group(store, -1, 2, gloo()), c10::ValueError);
    EXPECT_THROW(make_process_group(store, 0, 0, gloo()), c10::ValueError);
    EXPECT_THROW(make_process_group(store, 0, 1, gloo().timeout(milliseconds(0))), c10::ValueError);
    auto message = message_of<c10::ValueError>(
        [&] { make_process_group(store, 0, 1, gloo().backend("smoke")); });
    EXPECT_NE(message.find("got \"smoke\" (rank 0 of 1)"), std::string::npos) << message;
  });
}

TEST(ProcessGroup, NcclWhereAbsentIsAClearError) {
  if (at::hasCUDA()) GTEST_SKIP() << "there is a GPU";
  test::run_ranks(1, [](const ProcessGroupPtr& group) {
    auto message = message_of<c10::ValueError>(
        [&] { make_process_group(group->getStore(), 0, 1, gloo().backend("nccl")); });
    EXPECT_NE(message.find("expected backend \"gloo\", got \"nccl\""), std::string::npos)
        << message;
    EXPECT_NE(message.find("(rank 0 of 1)"), std::string::npos) << message;
  });
}

TEST(ProcessGroup, WithoutNcclTheDefaultIsGloo) {
  if (at::hasCUDA()) GTEST_SKIP() << "there is a GPU";
  auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_EQ(sum_over(make_process_group(store, 0, 1, gloo().backend("")), 3.0), 3.0);
}

TEST(ProcessGroup, TimeoutRaises) {
  test::run_ranks(
      2,
      [](const ProcessGroupPtr& group) {
        if (group->getRank() == 0) {
          auto start = std::chrono::steady_clock::now();
          EXPECT_ANY_THROW(sum_over(group, 1));
          auto waited = std::chrono::steady_clock::now() - start;
          EXPECT_GE(waited, milliseconds(300));
          EXPECT_LT(waited, milliseconds(20000));
          group->getStore()->set("rank 0 is done", "");
        } else {
          // Stays in the group without taking part.
          group->getStore()->wait({"rank 0 is done"}, std::chrono::seconds(60));
        }
      },
      std::chrono::seconds(120), std::chrono::seconds(4));
}

TEST(ProcessGroup, AbsentRankTimesOutAtConstruction) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(milliseconds(500));
  const auto message = message_of<c10::Error>(
      [&] { make_process_group(store, 0, 2, gloo().timeout(milliseconds(500))); });
  EXPECT_NE(message.find("shardstep: while connecting with the other ranks (rank 0 of 2)"),
            std::string::npos)
      << message;
}

TEST(RunRanks, RethrowsTheFirstFailure) {
  auto start = std::chrono::steady_clock::now();
  EXPECT_THROW(test::run_ranks(3,
                               [](const ProcessGroupPtr& group) {
                                 if (group->getRank() == 2) throw std::out_of_range("on purpose");
                                 sum_over(group, 1);
                               }),
               std::out_of_range);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(25));
}

TEST(NewGroup, KeepsTheOrderGiven) {
  test::run_ranks(5, [](const ProcessGroupPtr& world) {
    const int rank = world->getRank();
    auto group = new_group({4, 0, 3}, gloo(), world);
    if (rank == 1 || rank == 2) {
      EXPECT_FALSE(group);
      return;
    }
    EXPECT_EQ(group->getSize(), 3);
    EXPECT_EQ(group->getRank(), rank == 4 ? 0 : rank == 0 ? 1 : 2);
    EXPECT_EQ(sum_over(group, rank), 7);
  });
}

// What new_group() returns to ranks outside the group is never taken for the default group.
TEST(NewGroup, NoGroupIsNotTheDefaultGroup) {
  init_process_group(gloo());
  const ProcessGroupPtr none;
  const auto module = std::make_shared<torch::nn::LinearImpl>(2, 2);
  const auto zero_options = ZeroOptions().process_group(none);
  const std::vector<std::function<void()>> uses = {
      [&] { new_group({0}, gloo(), none); }, [&] { global_rank(none, 0); },
      [&] {
        ZeroRedundancyOptimizer(module->parameters(), torch::optim::SGDOptions(1), zero_options);
      },
      [&] {
        DistributedDataParallel ddp(module, DistributedDataParallelOptions().process_group(none));
      }};
  for (const auto& use : uses) {
    const auto message = message_of<c10::ValueError>(use);
    EXPECT_NE(message.find("got a null one"), std::string::npos) << message;
    EXPECT_NE(message.find("(rank 0 of 1)"), std::string::npos) << message;
  }
  EXPECT_THROW(global_rank(default_process_group(), 1), c10::ValueError);
  EXPECT_THROW(global_rank(default_process_group(), -1), c10::ValueError);
  destroy_process_group();
}

TEST(NewGroup, GroupsOfGroupsAndRepeatedLists) {
  test::run_ranks(4, [](const ProcessGroupPtr& world) {
    const int rank = world->getRank();
    auto odd = new_group({3, 1}, gloo(), world);
    auto again = new_group({3, 1}, gloo(), world);
    auto alone = new_group({2}, gloo(), world);
    ASSERT_EQ(static_cast<bool>(odd), rank % 2 == 1);
    ASSERT_EQ(static_cast<bool>(alone), rank == 2);
    if (alone) EXPECT_EQ(sum_over(alone, 5), 5);
    if (!odd) return;
    EXPECT_EQ(sum_over(odd, rank), 4);
    EXPECT_EQ(sum_over(again, 2.0 * rank), 8);
    auto inner = new_group({1}, gloo(), odd);  // odd's rank 1 is the world's rank 1
    EXPECT_EQ(static_cast<bool>(inner), rank == 1);
  });
}

TEST(NewGroup, RefusesBadLists) {
  const std::vector<std::pair<std::vector<int>, std::string>> cases = {
      {{}, "at least one rank"},
      {{0, 2}, "ranks from 0 to 1 for a new group, got 2"},
      {{-1}, "got -1"},
      {{1, 0, 1}, "got 1 twice"},
  };
  test::run_ranks(2, [&](const ProcessGroupPtr& world) {
    for (auto& [ranks, expected] : cases) {
      auto message = message_of<c10::ValueError>([&] { new_group(ranks, gloo(), world); });
      EXPECT_NE(message.find(expected), std::string::npos) << message;
      EXPECT_NE(message.find("of 2)"), std::string::npos) << message;
    }
  });
}

TEST(NewGroup, DifferentListsFailOnEveryRank) {
  test::run_ranks(3, [](const ProcessGroupPtr& world) {
    std::vector<int> ranks{0, 1};
    if (world->getRank() == 2) ranks = {0, 2};
    auto message = message_of<c10::ValueError>([&] { new_group(ranks, gloo(), world); });
    EXPECT_NE(message.find("got [0, 1] on rank 0 and [0, 2] on rank 2"), std::string::npos)
        << message;
  });
}

TEST(DefaultGroup, IsSetOnceAndForgotten) {
  EXPECT_FALSE(has_default_process_group());
  auto message = message_of<c10::Error>([] { default_process_group(); });
  EXPECT_NE(message.find("init_process_group"), std::string::npos) << message;
  auto group = init_process_group(gloo());
  EXPECT_EQ(group->getSize(), 1);
  EXPECT_EQ(default_process_group(), group);
  EXPECT_EQ(sum_over(group, 3), 3);
  EXPECT_THROW(init_process_group(gloo()), c10::Error);
  EXPECT_EQ(new_group({0})->getSize(), 1);
  destroy_process_group();
  EXPECT_FALSE(has_default_process_group());
  EXPECT_EQ(init_process_group(gloo())->getSize(), 1);
  destroy_process_group();
}

}  // namespace
}  // namespace shardstep
