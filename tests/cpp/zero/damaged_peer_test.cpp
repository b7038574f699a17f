// A rank whose memory is damaged writes nonsense where others read: they get errors, not crashes.
// Ranks are threads of a forked process, so that a crash is a failure here and not the end.

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <thread>

#include "comm/exchange.h"
#include "comm/message_tag.h"
#include "comm/peer_input.h"
#include "shard/shard_engine.h"
#include "shard/state_transfer.h"
#include "shardstep/shardstep.h"
#include "support/forked_ranks.h"
#include "support/full_run.h"
#include "support/test_support.h"
#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep {
namespace {

constexpr int kPeers = 3;
constexpr auto kShortTimeout = std::chrono::seconds(2);

struct MappedSegment {
  char* begin = nullptr;
  size_t bytes = 0;
};

// One mapping of each segment of shared memory of this process.
std::vector<MappedSegment> mapped_segments() {
  std::ifstream maps("/proc/self/maps");
  std::map<std::string, MappedSegment> by_name;
  for (std::string line; std::getline(maps, line);) {
    const auto name = line.find("/memfd:shardstep");
    if (name == std::string::npos) continue;
    uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream(line) >> std::hex >> begin >> dash >> end;
    by_name[line.substr(name)] = {reinterpret_cast<char*>(begin), end - begin};
  }
  std::vector<MappedSegment> segments;
  for (const auto& [name, segment] : by_name) segments.push_back(segment);
  return segments;
}

// Numbers that are likely to be believed, or to overflow.
uint32_t nonsense(std::mt19937& random) {
  const std::vector<uint32_t> likely{0, 1, 23, 24, 25, 31, 32, 33, 1u << 20, 0x7fffffffu, ~0u};
  return random() % 2 == 0 ? likely[random() % likely.size()] : static_cast<uint32_t>(random());
}

// Overwrites words of the first pages, where counts, queues and notices are.
void damage(std::mt19937& random, int words) {
  constexpr size_t kHeaders = 16 * 1024;
  for (const auto& segment : mapped_segments()) {
    const size_t room = std::min(segment.bytes, kHeaders) / 4;
    for (int i = 0; i < words; ++i) {
      const uint32_t word = nonsense(random);
      std::memcpy(segment.begin + 64 + random() % (room - 17) * 4, &word, sizeof(word));
    }
  }
}

// Whatever happens on the ranks, the process does not crash.
void expect_no_crash(const std::string& what,
                     const std::function<void(const ProcessGroupPtr&)>& body) {
  const auto pid = test::fork_process(
      [&] {
        test::run_ranks(
            kPeers,
            [&](const ProcessGroupPtr& group) {
              try {
                body(group);
              } catch (const std::exception& error) {
                if (group->getRank() == 0) std::printf("%.160s\n", error.what());
              }
            },
            std::chrono::seconds(60), kShortTimeout);
      },
      90);
  EXPECT_EQ(test::status_of(pid), 0) << what;
}

std::unique_ptr<ZeroRedundancyOptimizer> make_damaged(std::vector<at::Tensor>& params,
                                                      const ProcessGroupPtr& group,
                                                      ExchangeKind exchange) {
  params = test::make_params();
  return std::make_unique<ZeroRedundancyOptimizer>(params, torch::optim::AdamWOptions(0.01),
                                                   ZeroOptions()
                                                       .stage(2)
                                                       .process_group(group)
                                                       .sharding(Sharding::kElement)
                                                       .exchange(exchange)
                                                       .bucket_cap_mb(1e-4));
}

void damaged_step(std::vector<at::Tensor>& params, ZeroRedundancyOptimizer& zero) {
  at::Tensor loss = torch::zeros({});
  for (const auto& param : params) loss = loss + param.square().sum();
  loss.backward();
  zero.clip_grad_norm_(1.0);
  zero.step();
  zero.zero_grad();
}

TEST(DamagedPeer, NonsenseInSharedMemoryIsAnErrorAndNoCrash) {
  for (int seed : test::sample(60, 1)) {
    expect_no_crash(c10::str("seed ", seed), [&](const ProcessGroupPtr& group) {
      std::mt19937 random(static_cast<unsigned>(seed));
      std::vector<at::Tensor> params;
      auto zero = make_damaged(params, group, ExchangeKind::kSharedMemory);
      damaged_step(params, *zero);
      for (int round = 0; round < 20; ++round) {
        if (group->getRank() == 1) damage(random, 1 + seed % 7);
        damaged_step(params, *zero);
      }
    });
  }
}

// Rank 1 answers with nonsense where the others gather the state.
TEST(DamagedPeer, NonsenseInACatalogueOfStateIsAnErrorAndNoCrash) {
  for (int seed : test::sample(200, 2)) {
    expect_no_crash(c10::str("seed ", seed), [&](const ProcessGroupPtr& group) {
      std::mt19937 random(static_cast<unsigned>(seed));
      std::vector<at::Tensor> params;
      auto zero = make_damaged(params, group, ExchangeKind::kPairwise);
      damaged_step(params, *zero);
      if (group->getRank() != 1) {
        gather_state(zero->engine(), {}, 0);
        EXPECT_NE(group->getRank(), 0) << "expected an error";
        return;
      }
      auto& exchange = *zero->engine().exchange();
      const int64_t bytes = random() % 3 == 0 ? random() % 4096 : 8 * (1 + random() % 64);
      const auto text = at::empty({bytes}, at::kByte);
      auto* const data = text.mutable_data_ptr<uint8_t>();
      for (int64_t i = 0; i < bytes; ++i) data[i] = static_cast<uint8_t>(random());
      // Small numbers come further.
      for (int64_t i = 0; i + 8 <= bytes; i += 8) {
        const int64_t number = random() % 4 == 0 ? static_cast<int32_t>(random()) : random() % 9;
        std::memcpy(data + i, &number, sizeof(number));
      }
      const int64_t said = random() % 4 == 0 ? static_cast<int32_t>(random()) : bytes;
      exchange
          .gather({at::full({1}, said, at::kLong)}, Parts(kPeers), 0, ControlMessage::kStateSizes)
          ->wait();
      exchange.gather({text}, Parts(kPeers), 0, ControlMessage::kStateCatalogues)->wait();
    });
  }
}

TEST(DamagedPeer, ANumberOutOfBoundsIsNamed) {
  const auto pid = test::fork_process([] {
    const auto group = test::alone();
    const detail::PeerInput peer(group, 7);
    EXPECT_EQ(peer.check("the slot", 3, 0, 3), 3);
    for (int64_t number : {int64_t{-1}, int64_t{4}, INT64_MIN, INT64_MAX}) {
      const auto message =
          test::error_of<c10::Error>([&] { peer.check("the slot", number, 0, 3); });
      EXPECT_NE(
          message.find(c10::str("expected the slot of rank 7 to be from 0 to 3, got ", number)),
          std::string::npos)
          << message;
      EXPECT_NE(message.find("(rank 0 of 1)"), std::string::npos) << message;
    }
  });
  EXPECT_EQ(test::status_of(pid), 0);
}

}  // namespace
}  // namespace shardstep
