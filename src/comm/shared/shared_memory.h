#pragma once

// Memory that the ranks of a group on one host share, and waiting for each other in it. Ranks may
// be threads of one process. Thread safety: one thread at a time per rank.

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/shared/counters.h"
#include "comm/shared/notice_board.h"
#include "comm/shared/segment.h"
#include "shardstep/process_group.h"

namespace shardstep::detail {

class SharedMemory {
 public:
  // Null if a rank cannot open what another one shares: then they are not on one host. Collective.
  static std::shared_ptr<SharedMemory> connect(const ProcessGroupPtr& group);
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  int rank() const { return group_->getRank(); }
  int world_size() const { return group_->getSize(); }

  // Zeroed memory that every rank sees which comes with the same key and layout; the header is
  // reserved, and so is what `reserve_own` says of this rank's range. Throws if there is no room.
  // Does not wait for other ranks, which may come with their keys in any order.
  enum class ReserveOwn { kNow, kLater };
  Segment allocate(int64_t key, const SegmentLayout& layout,
                   ReserveOwn reserve_own = ReserveOwn::kNow);
  // After the other ranks know.
  [[noreturn]] void throw_no_room(int64_t bytes, int error);

  // Raises a count of this rank, and wakes those who wait for it.
  void raise(SharedCount& count);
  // Returns when `count` of `rank` has reached `value`. `what` says what is waited for: "the
  // parameters". Throws as wait_until does.
  void wait(const SharedCount& count, uint32_t value, int rank,
            const std::function<std::string()>& what);

  // Rung by other ranks when they have done something for `rank`.
  Bell& mail_bell(int rank) { return ranks_[rank].mail; }
  // Looks whenever `bell` rings, and at least every `look`, until `reached` says so. Throws if a
  // rank has given up, `awaited()` is gone, or the group's timeout has passed.
  struct Waiting {
    Bell& bell;
    std::function<int()> awaited;  // the rank, for the error
    std::function<std::string()> what;
    std::chrono::milliseconds look = std::chrono::milliseconds(100);
  };
  void wait_until(const std::function<bool()>& reached, const Waiting& waiting);

  // From here on, whatever a rank waits for ends in an error that says this.
  void give_up(const std::string& message);

 private:
  // What a rank shows to all others.
  struct Rank {
    static constexpr size_t kMessage = 1024;
    Bell raised;  // a count of this rank
    Bell mail;
    std::atomic<uint32_t> gave_up;
    char message[kMessage];
  };

  explicit SharedMemory(const ProcessGroupPtr& group);
  bool is_gone(int rank) const;
  std::optional<int> who_is_gone(int awaited, bool anyone) const;
  void check_nobody_gave_up() const;
  Segment find_or_make(NoticeBoardLock& lock, int64_t key, const SegmentLayout& layout);
  void close_what_all_have_opened();

  ProcessGroupPtr group_;
  std::chrono::milliseconds timeout_;
  std::vector<int64_t> pids_;
  std::vector<FileDescriptor> processes_;  // not open where the kernel has no such thing
  Segment control_;
  Rank* ranks_ = nullptr;
  NoticeBoard* board_ = nullptr;
  // Segments that this rank made and not all others have opened, by key.
  std::map<int64_t, std::shared_ptr<const FileDescriptor>> offered_;
};

}  // namespace shardstep::detail
