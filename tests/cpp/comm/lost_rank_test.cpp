// A rank dies while another waits for all ranks in a collective. That one need not be connected
// with the dead one in the collective: in a ring it may wait for a third, which is computing, or
// has raised and is writing its log. Gloo alone would let it wait until the group's timeout.

#include <gtest/gtest.h>
#include <signal.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "comm/collectives.h"
#include "comm/make_exchange.h"
#include "shardstep/shardstep.h"
#include "support/folder.h"
#include "support/forked_ranks.h"
#include "support/torch.h"

namespace shardstep {
namespace {

constexpr int kLosingRanks = 3;
constexpr int kLostRank = 1;  // of ranks 0 and 2, one waits, and the other does something else
constexpr int64_t kLostNumel = 1000;
constexpr auto kLosingTimeout = std::chrono::seconds(60);

using Collective = std::function<void(const ProcessGroupPtr&, Exchange&)>;

struct Wait {
  std::atomic<bool> ended;
  std::chrono::steady_clock::duration took;
  std::array<char, 2000> error;
};

void run_rank(int rank, int waiting, ExchangeKind kind, const Collective& collective,
              const test::Folder& folder, Wait& wait) {
  // Never destroyed: Gloo's threads are joined then, and one may wait until the timeout.
  auto* const group = new ProcessGroupPtr(
      test::join_group(c10::make_intrusive<c10d::FileStore>(folder / "store", kLosingRanks), rank,
                       kLosingRanks, kLosingTimeout));
  // Two hosts, as far as the hierarchical exchange knows; rank 2 is alone on its own.
  if (kind == ExchangeKind::kHierarchical) ::setenv("SHARDSTEP_TEST_HOSTS", "a,a,b", 1);
  auto* const exchange = make_exchange(*group, {.kind = kind, .channel = 0}).release();
  if (rank == kLostRank) {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    ::raise(SIGKILL);
  }
  if (rank == waiting) {
    const auto begin = std::chrono::steady_clock::now();
    std::string error = "none";
    try {
      collective(*group, *exchange);
    } catch (const std::exception& caught) {
      error = caught.what();
    }
    wait.took = std::chrono::steady_clock::now() - begin;
    error.copy(wait.error.data(), wait.error.size() - 1);
    wait.ended = true;
  }
  while (!wait.ended) std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

// Three ranks, of which `waiting` makes the collective.
class LosingWorld {
 public:
  LosingWorld(int waiting, ExchangeKind kind, const Collective& collective)
      : waiting_(waiting), kind_(kind) {
    for (int rank = 0; rank < kLosingRanks; ++rank) {
      pids_.push_back(test::fork_process(
          [&, rank] { run_rank(rank, waiting, kind, collective, folder_, *wait_); }, 120));
    }
  }
  void expect_an_error_soon() {
    SCOPED_TRACE(c10::str("rank ", waiting_, " waits, exchange ", static_cast<int>(kind_)));
    for (int rank = 0; rank < kLosingRanks; ++rank) {
      EXPECT_EQ(WIFSIGNALED(test::status_of(pids_[rank])), rank == kLostRank) << "rank " << rank;
    }
    const std::string error = wait_->error.data();
    EXPECT_LT(wait_->took, test::patience() * test::kPromised) << error;
    for (const auto& part :
         {c10::str("rank ", kLostRank), c10::str("(rank ", waiting_, " of 3)")}) {
      EXPECT_NE(error.find(part), std::string::npos) << error;
    }
  }

 private:
  int waiting_;
  ExchangeKind kind_;
  test::Folder folder_;
  test::Shared<Wait> wait_;
  std::vector<pid_t> pids_;
};

// The worlds run side by side: they only wait.
void expect_waits_end_soon(const Collective& collective,
                           const std::vector<ExchangeKind>& kinds = {
                               ExchangeKind::kSharedMemory, ExchangeKind::kPairwise,
                               ExchangeKind::kNative, ExchangeKind::kHierarchical}) {
  std::vector<std::unique_ptr<LosingWorld>> worlds;
  for (auto kind : kinds) {
    for (int waiting : {0, 2}) {
      worlds.push_back(std::make_unique<LosingWorld>(waiting, kind, collective));
    }
  }
  for (auto& world : worlds) world->expect_an_error_soon();
}

Parts parts_of(int64_t numel) {
  Parts parts;
  for (int rank = 0; rank < kLosingRanks; ++rank) parts.push_back({at::ones({numel})});
  return parts;
}

void reduce(Exchange& exchange, std::optional<at::ScalarType> wire) {
  const auto reduction =
      exchange.make_reduction({.numel = std::vector<int64_t>(kLosingRanks, kLostNumel),
                               .tensor = at::TensorOptions().dtype(at::kFloat),
                               .wire = wire});
  reduction->post(parts_of(kLostNumel), /*squares=*/false);
  reduction->finish();
}

TEST(LostRank, EndsABroadcast) {
  expect_waits_end_soon(
      [](const ProcessGroupPtr& group, Exchange&) {
        // Rank 0 is done with one when its messages are on the way.
        for (int i = 0; i < 1000; ++i) detail::broadcast(group, {at::ones({kLostNumel})});
      },
      {ExchangeKind::kNative});
}

// The constructor agrees on options and parameters.
TEST(LostRank, EndsAnAgreement) {
  expect_waits_end_soon(
      [](const ProcessGroupPtr& group, Exchange&) {
        ZeroRedundancyOptimizer({torch::ones({1}).requires_grad_()}, torch::optim::SGDOptions(0.1),
                                ZeroOptions().process_group(group));
      },
      {ExchangeKind::kNative});
}

TEST(LostRank, EndsAGather) {
  expect_waits_end_soon([](const ProcessGroupPtr&, Exchange& exchange) {
    exchange.all_gather(parts_of(kLostNumel), MessageTag::bucket(0))->wait();
  });
}

TEST(LostRank, EndsASum) {
  expect_waits_end_soon([](const ProcessGroupPtr&, Exchange& exchange) {
    exchange.reduce_scatter(parts_of(kLostNumel), MessageTag::bucket(0), /*divisor=*/1)->wait();
  });
}

TEST(LostRank, EndsAReduction) {
  expect_waits_end_soon(
      [](const ProcessGroupPtr&, Exchange& exchange) { reduce(exchange, std::nullopt); });
}

TEST(LostRank, EndsAReductionOfRoundedParts) {
  expect_waits_end_soon(
      [](const ProcessGroupPtr&, Exchange& exchange) { reduce(exchange, at::kBFloat16); });
}

// Who gathers waits for each rank's message only.
TEST(LostRank, ThatHasDoneItsPartIsNotMissed) {
  const test::Folder folder;
  std::vector<pid_t> pids;
  for (int rank = 0; rank < kLosingRanks; ++rank) {
    pids.push_back(test::fork_process([&, rank] {
      auto* const group = new ProcessGroupPtr(
          test::join_group(c10::make_intrusive<c10d::FileStore>(folder / "store", kLosingRanks),
                           rank, kLosingRanks, kLosingTimeout));
      auto* const exchange =
          make_exchange(*group, {.kind = ExchangeKind::kPairwise, .channel = 0}).release();
      // Long enough to be looked at several times.
      if (rank == 2) std::this_thread::sleep_for(std::chrono::seconds(13));
      Parts into{{}, {at::zeros({kLostNumel})}, {at::zeros({kLostNumel})}};
      const auto own = at::full({kLostNumel}, static_cast<double>(rank));
      exchange->gather({own}, into, /*to=*/0, MessageTag::bucket(0))->wait();
      if (rank == 0) EXPECT_EQ(into[2][0].sum().item<double>(), 2 * kLostNumel);
    }));
  }
  for (const auto pid : pids) EXPECT_EQ(test::status_of(pid), 0);
}

}  // namespace
}  // namespace shardstep
