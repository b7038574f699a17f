#pragma once

// Memory that the ranks of a group on one host share, and waiting in it. The memory has no name: it
// lives as long as a process maps it, also if one is killed. Ranks may be threads of one process.
// Thread safety: one thread at a time per rank.

#include <ATen/ATen.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shardstep/process_group.h"

namespace shardstep::detail {

// A count that ranks raise and others wait for. It lies in shared memory.
struct alignas(64) SharedCount {
  std::atomic<uint32_t> value{0};
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

class SharedMemory {
 public:
  // Null if a rank cannot open what another one shares: then they are not on one host. Collective.
  static std::shared_ptr<SharedMemory> connect(const ProcessGroupPtr& group);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Zeroed memory that every rank sees which comes with the same key. It lives as long as the
  // pointer on some rank. Throws on every rank if there is no room. Does not wait for other ranks,
  // which may come with their keys in any order.
  std::shared_ptr<std::byte> allocate(int64_t key, int64_t bytes);

  // Raises a count of this rank, and wakes who waits for this rank.
  void raise(SharedCount& count);
  // Returns when `count` of `rank` has reached `value`. Throws if that rank is gone, or when the
  // group's timeout has passed. `what` says what is waited for: "the gradients of bucket 3".
  void wait(const SharedCount& count, uint32_t value, int rank,
            const std::function<std::string()>& what);
  // Whether it has by `end`.
  bool reaches(const SharedCount& count, uint32_t value, int rank,
               std::chrono::steady_clock::time_point end);
  static bool reached(const SharedCount& count, uint32_t value) {
    // Counts wrap around.
    return static_cast<int32_t>(count.value.load(std::memory_order_acquire) - value) >= 0;
  }

 private:
  struct Notice;
  struct Board;
  explicit SharedMemory(const ProcessGroupPtr& group);
  std::optional<int> who_is_gone(int awaited, bool anyone) const;
  void ring(int rank);
  // Looks again whenever `rank` rings.
  void wait_until(const std::function<bool()>& reached, int rank,
                  const std::function<std::string()>& what);
  bool find_or_make(int64_t key, int64_t bytes, std::shared_ptr<std::byte>& memory, int& error);

  ProcessGroupPtr group_;
  std::chrono::milliseconds timeout_;
  std::vector<int64_t> pids_;
  std::vector<int> process_handles_;  // -1 where the kernel has none
  std::shared_ptr<std::byte> control_;
  std::vector<SharedCount*> bells_;  // one per rank, rung whenever it raises a count
  Board* board_ = nullptr;           // where memory can be opened
  std::map<int64_t, int> offered_;   // descriptors of memory that not all ranks have opened, by key
};

}  // namespace shardstep::detail
