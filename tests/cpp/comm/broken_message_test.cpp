// A rank dies while a message is half sent. Gloo forgets such a message, so without
// comm/connection_watch.h the other rank would wait until the group's timeout.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <sstream>
#include <thread>

#include "comm/exchange.h"
#include "comm/make_exchange.h"
#include "shardstep/shardstep.h"
#include "support/folder.h"
#include "support/forked_ranks.h"
#include "support/torch.h"

namespace shardstep {
namespace {

using Seconds = std::chrono::duration<double>;

// More than sockets hold.
constexpr int64_t kTransferBytes = 64 << 20;
constexpr auto kBrokenTimeout = std::chrono::seconds(60);

enum class Transfer { kToVictim, kFromVictim };

// Memory that both ranks see: what has arrived tells the victim when to die.
class ReceivedBytes {
 public:
  ReceivedBytes()
      : memory_(::mmap(nullptr, kTransferBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                       -1, 0)) {
    TORCH_CHECK(memory_ != MAP_FAILED, "mmap failed");
  }
  ~ReceivedBytes() { ::munmap(memory_, kTransferBytes); }
  at::Tensor tensor() const { return at::from_blob(memory_, {kTransferBytes}, at::kByte); }
  void wait_for_the_first() const {
    const volatile auto* const byte = static_cast<const uint8_t*>(memory_);
    while (*byte == 0) std::this_thread::yield();
  }

 private:
  void* memory_;
};

// What a rank does; rank 1 is the victim.
using BreakingBody = std::function<void(const ProcessGroupPtr&, const ReceivedBytes&)>;

// Rank 0 notes how long it took, and its error.
void run_rank(int rank, const BreakingBody& body, const ReceivedBytes& received,
              const test::Folder& folder) {
  // Never destroyed: Gloo's threads are joined then, and one may wait until the timeout.
  auto* const group = new ProcessGroupPtr(test::join_group(
      c10::make_intrusive<c10d::FileStore>(folder / "store", 2), rank, 2, kBrokenTimeout));
  std::thread victim;
  if (rank == 1) {
    victim = std::thread([&] {
      received.wait_for_the_first();
      ::raise(SIGKILL);
    });
  }
  const auto begin = std::chrono::steady_clock::now();
  std::string error = "none";
  try {
    // On a busy machine all of a message may arrive before the victim dies; then it is the next
    // one.
    for (;;) body(*group, received);
  } catch (const std::exception& caught) {
    error = caught.what();
  }
  if (victim.joinable()) victim.join();
  const Seconds took = std::chrono::steady_clock::now() - begin;
  std::ofstream(folder / "outcome") << took.count() << ' ' << error;
}

void expect_the_other_raises_soon(const BreakingBody& body) {
  const test::Folder folder;
  const ReceivedBytes received;
  std::vector<pid_t> pids;
  for (int rank : {0, 1}) {
    pids.push_back(test::fork_process([&] { run_rank(rank, body, received, folder); }, 120));
  }
  EXPECT_EQ(test::status_of(pids[0]), 0);
  EXPECT_TRUE(WIFSIGNALED(test::status_of(pids[1])));
  std::ifstream outcome(folder / "outcome");
  Seconds::rep took = 1e9;
  std::stringstream error;
  outcome >> took;
  error << outcome.rdbuf();
  EXPECT_LT(Seconds(took), test::patience() * test::kPromised) << error.str();
  for (const char* part : {"rank 1", "(rank 0 of 2)"}) {
    EXPECT_NE(error.str().find(part), std::string::npos) << error.str();
  }
}

BreakingBody transfer(Transfer direction) {
  return [direction](const ProcessGroupPtr& group, const ReceivedBytes& received) {
    const auto exchange = make_exchange(group, {.kind = ExchangeKind::kPairwise, .channel = 0});
    const int to = direction == Transfer::kToVictim ? 1 : 0;
    const auto bytes =
        group->getRank() == to ? received.tensor() : at::ones({kTransferBytes}, at::kByte);
    exchange->transfer({bytes}, 1 - to, to, MessageTag::bucket(0))->wait();
  };
}

TEST(BrokenMessage, FromARankThatDiedIsAnErrorSoon) {
  expect_the_other_raises_soon(transfer(Transfer::kFromVictim));
}

TEST(BrokenMessage, ToARankThatDiedIsAnErrorSoon) {
  expect_the_other_raises_soon(transfer(Transfer::kToVictim));
}

// An optimizer broadcasts the parameters. No byte of 0.1 is 0.
TEST(BrokenMessage, OfACollectiveIsAnErrorSoon) {
  expect_the_other_raises_soon([](const ProcessGroupPtr& group, const ReceivedBytes& received) {
    auto param = group->getRank() == 1 ? received.tensor().view(at::kFloat)
                                       : torch::full({kTransferBytes / 4}, 0.1);
    ZeroRedundancyOptimizer(
        {param.requires_grad_()}, torch::optim::SGDOptions(0.1),
        ZeroOptions().process_group(group).exchange(ExchangeKind::kNative).stage(2));
  });
}

// A module's buffers.
TEST(BrokenMessage, OfBuffersIsAnErrorSoon) {
  expect_the_other_raises_soon([](const ProcessGroupPtr& group, const ReceivedBytes& received) {
    const auto module = std::make_shared<torch::nn::Module>();
    auto param = module->register_parameter("param", torch::ones({1}));
    module->register_buffer("buffer", group->getRank() == 1
                                          ? received.tensor().view(at::kFloat)
                                          : torch::full({kTransferBytes / 4}, 0.1));
    ZeroRedundancyOptimizer(
        {param}, torch::optim::SGDOptions(0.1),
        ZeroOptions().process_group(group).exchange(ExchangeKind::kNative).stage(2).module(module));
  });
}

}  // namespace
}  // namespace shardstep
