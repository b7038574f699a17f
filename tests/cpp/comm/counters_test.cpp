// Hammers the counts, bells and queues of comm/shared/counters.h from threads and from processes.
// What they guard is plain memory, so the thread sanitizer sees a missing order; a wake-up that is
// lost leaves a rank asleep until its limit, which is a failure. proofs/waiting.pml shows the same
// for every schedule.

#include "comm/shared/counters.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "support/full_run.h"

namespace shardstep {
namespace {

constexpr int kHammers = 4;
constexpr auto kNeverThatLong = std::chrono::seconds(20);

// All of what the ranks of a test share.
struct Hammered {
  using Queue = detail::SharedQueue<uint64_t, 8>;
  detail::SharedCount counts[kHammers];
  detail::Bell bells[kHammers];
  uint64_t data[kHammers][16];  // guarded by the count
  Queue there[kHammers], back[kHammers];
  detail::Bell mail[kHammers];
};

// Waits as SharedMemory::wait_until does, but for the bell alone. False if it slept for its whole
// limit: then nobody woke it, even if what it waits for has come.
bool wait_for(detail::Bell& bell, const std::function<bool()>& reached) {
  const auto limit = test::patience() * kNeverThatLong;
  for (;;) {
    const uint32_t heard = bell.heard();
    if (reached()) return true;
    const auto begin = std::chrono::steady_clock::now();
    bell.wait(heard, limit);
    if (std::chrono::steady_clock::now() - begin >= limit) return false;
  }
}

void pause_at_random(std::mt19937& random) {
  const auto turns = random() % 8 == 0 ? random() % 2000 : 0;
  for (unsigned i = 0; i < turns; ++i) detail::spin_pause();
}

// Each rank writes, raises, and reads what the others wrote, in step.
bool hammer_counts(Hammered& shared, int rank, uint32_t rounds) {
  std::mt19937 random(static_cast<unsigned>(rank) + 1);
  for (uint32_t round = 1; round <= rounds; ++round) {
    for (auto& word : shared.data[rank]) word = round * 100 + static_cast<unsigned>(rank);
    pause_at_random(random);
    shared.counts[rank].raise();
    shared.bells[rank].ring();
    for (int other = 0; other < kHammers; ++other) {
      if (!wait_for(shared.bells[other],
                    [&] { return shared.counts[other].reached(2 * round - 1); })) {
        return false;
      }
      for (auto word : shared.data[other]) {
        if (word != round * 100 + static_cast<unsigned>(other)) return false;
      }
    }
    // All have read before anyone writes again.
    shared.counts[rank].raise();
    shared.bells[rank].ring();
    for (int other = 0; other < kHammers; ++other) {
      if (!wait_for(shared.bells[other], [&] { return shared.counts[other].reached(2 * round); })) {
        return false;
      }
    }
  }
  return true;
}

// Each rank sends to the next and gets its numbers back, with as many under way as there is room.
bool hammer_queues(Hammered& shared, int rank, uint64_t values) {
  std::mt19937 random(static_cast<unsigned>(rank) + 1);
  const int next = (rank + 1) % kHammers;
  const int last = (rank + kHammers - 1) % kHammers;
  uint32_t taken_there = 0, taken_back = 0;
  uint64_t sent = 0, returned = 0, answered = 0;
  while (returned < values || answered < values) {
    bool any = false;
    while (sent < values && sent - returned < 8) {
      shared.there[rank].push(++sent);
      shared.mail[next].ring();
      any = true;
    }
    while (const auto value = shared.there[last].pop(taken_there)) {
      if (*value != ++answered) return false;
      shared.back[last].push(*value * 3);
      shared.mail[last].ring();
      any = true;
    }
    while (const auto value = shared.back[rank].pop(taken_back)) {
      if (*value != ++returned * 3) return false;
      any = true;
    }
    pause_at_random(random);
    if (any || (returned == values && answered == values)) continue;
    const uint32_t popped_there = taken_there, popped_back = taken_back;
    if (!wait_for(shared.mail[rank], [&] {
          uint32_t there = popped_there, back = popped_back;
          return shared.there[last].pop(there) || shared.back[rank].pop(back);
        })) {
      return false;
    }
  }
  return true;
}

// Rank 0 rings once and waits until each of the others, which all sleep on its bell, has answered
// with one ring. The next ring comes after that, so it cannot make up for one that was lost.
bool call_and_answer(Hammered& shared, int rank, uint32_t rounds) {
  std::mt19937 random(static_cast<unsigned>(rank) + 1);
  const auto raise = [&] {
    pause_at_random(random);
    shared.counts[rank].raise();
    shared.bells[rank].ring();
  };
  const auto wait_for_rank = [&](int other, uint32_t round) {
    return wait_for(shared.bells[other], [&] { return shared.counts[other].reached(round); });
  };
  for (uint32_t round = 1; round <= rounds; ++round) {
    if (rank != 0 && !wait_for_rank(0, round)) return false;
    raise();
    for (int other = 1; rank == 0 && other < kHammers; ++other) {
      if (!wait_for_rank(other, round)) return false;
    }
  }
  return true;
}

// The same with queues, in pairs: one value is under way at a time.
bool send_and_return(Hammered& shared, int rank, uint64_t values) {
  std::mt19937 random(static_cast<unsigned>(rank) + 1);
  const int partner = rank ^ 1;
  uint32_t taken = 0;
  const auto send = [&](uint64_t value) {
    pause_at_random(random);
    shared.there[rank].push(value);
    shared.mail[partner].ring();
  };
  const auto receive = [&](uint64_t expected) {
    std::optional<uint64_t> got;
    return wait_for(shared.mail[rank],
                    [&] { return (got = shared.there[partner].pop(taken)).has_value(); }) &&
           *got == expected;
  };
  for (uint64_t value = 1; value <= values; ++value) {
    if (rank < partner) send(value);
    if (!receive(rank < partner ? value * 3 : value)) return false;
    if (rank > partner) send(value * 3);
  }
  return true;
}

using Hammer = std::function<bool(Hammered&, int rank)>;

class Counters : public testing::Test {
 protected:
  Counters() {
    void* const memory = ::mmap(nullptr, sizeof(Hammered), PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    shared_ = static_cast<Hammered*>(memory);
  }
  ~Counters() override { ::munmap(shared_, sizeof(Hammered)); }

  void on_threads(const Hammer& hammer) {
    std::vector<std::thread> threads;
    std::atomic<int> good{0};
    for (int rank = 0; rank < kHammers; ++rank) {
      threads.emplace_back([&, rank] { good += hammer(*shared_, rank); });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(good, kHammers);
  }

  void on_processes(const Hammer& hammer) {
    std::vector<pid_t> processes;
    for (int rank = 0; rank < kHammers; ++rank) {
      processes.push_back(::fork());
      if (processes.back() == 0) ::_exit(hammer(*shared_, rank) ? 0 : 1);
    }
    for (pid_t process : processes) {
      int status = 0;
      ::waitpid(process, &status, 0);
      EXPECT_EQ(status, 0);
    }
  }

  Hammered* shared_;
};

int hammer_rounds() { return test::rounds(2000, 100000); }

TEST_F(Counters, CountsOnThreads) {
  on_threads(
      [](Hammered& shared, int rank) { return hammer_counts(shared, rank, hammer_rounds()); });
}

TEST_F(Counters, CountsOnProcesses) {
  on_processes(
      [](Hammered& shared, int rank) { return hammer_counts(shared, rank, hammer_rounds()); });
}

TEST_F(Counters, QueuesOnThreads) {
  on_threads(
      [](Hammered& shared, int rank) { return hammer_queues(shared, rank, hammer_rounds()); });
}

TEST_F(Counters, QueuesOnProcesses) {
  on_processes(
      [](Hammered& shared, int rank) { return hammer_queues(shared, rank, hammer_rounds()); });
}

TEST_F(Counters, EveryRingWakesOnThreads) {
  on_threads(
      [](Hammered& shared, int rank) { return call_and_answer(shared, rank, hammer_rounds()); });
}

TEST_F(Counters, EveryRingWakesOnProcesses) {
  on_processes(
      [](Hammered& shared, int rank) { return call_and_answer(shared, rank, hammer_rounds()); });
}

TEST_F(Counters, EveryValueWakesOnThreads) {
  on_threads(
      [](Hammered& shared, int rank) { return send_and_return(shared, rank, hammer_rounds()); });
}

TEST_F(Counters, EveryValueWakesOnProcesses) {
  on_processes(
      [](Hammered& shared, int rank) { return send_and_return(shared, rank, hammer_rounds()); });
}

TEST_F(Counters, CountsWrapAround) {
  auto& count = shared_->counts[0];
  count.value = UINT32_MAX - 1;
  EXPECT_TRUE(count.reached(UINT32_MAX - 1));
  EXPECT_FALSE(count.reached(UINT32_MAX));
  for (int i = 0; i < 3; ++i) count.raise();
  EXPECT_TRUE(count.reached(UINT32_MAX));
  EXPECT_TRUE(count.reached(1));
  EXPECT_FALSE(count.reached(2));
}

}  // namespace
}  // namespace shardstep
