#pragma once

// Counts, bells and a queue with which processes synchronize in memory that they share. Nothing
// here knows what is counted or sent, and nothing in it is a pointer. Memory starts zeroed.
// proofs/waiting.pml models how ranks wait with them: change both.

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>
#include <optional>

namespace shardstep::detail {

static_assert(std::atomic<uint32_t>::is_always_lock_free);

inline void spin_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

// A count that one rank raises. A rank that finds it raised sees what was written before.
struct alignas(64) SharedCount {
  std::atomic<uint32_t> value;

  void raise() { value.fetch_add(1, std::memory_order_release); }
  bool reached(uint32_t target) const {
    // Counts wrap around.
    return static_cast<int32_t>(value.load(std::memory_order_acquire) - target) >= 0;
  }
};

// Rung by any rank when something that others may wait for has changed.
struct alignas(64) Bell {
  std::atomic<uint32_t> rings;

  uint32_t heard() const { return rings.load(std::memory_order_acquire); }
  void ring() {
    rings.fetch_add(1, std::memory_order_release);
    ::syscall(SYS_futex, &rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
  // Sleeps until it has rung more often than `heard`, or for `limit`; may also wake up spuriously.
  void wait(uint32_t heard, std::chrono::nanoseconds limit) {
    const timespec time{static_cast<time_t>(limit.count() / 1000000000),
                        limit.count() % 1000000000};
    ::syscall(SYS_futex, &rings, FUTEX_WAIT, heard, &time, nullptr, 0);
  }
};

// Values from one rank to another, in order. REQUIRES: never more than kSlots values in it.
template <class T, uint32_t kSlots>
class SharedQueue {
 public:
  void push(const T& value) {
    slots_[pushed_.value.load(std::memory_order_relaxed) % kSlots] = value;
    pushed_.raise();
  }
  // How many values are there; more than kSlots means that the writer is damaged. `popped` is how
  // many the reader has taken.
  uint32_t waiting(uint32_t popped) const {
    return pushed_.value.load(std::memory_order_acquire) - popped;
  }
  // The next value, if there is one.
  std::optional<T> pop(uint32_t& popped) const {
    if (!pushed_.reached(popped + 1)) return std::nullopt;
    return slots_[popped++ % kSlots];
  }

 private:
  static_assert((kSlots & (kSlots - 1)) == 0);  // else slots would jump when the count wraps
  SharedCount pushed_;
  T slots_[kSlots];
};

}  // namespace shardstep::detail
