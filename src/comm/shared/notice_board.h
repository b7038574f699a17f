#pragma once

// A board in shared memory on which ranks post where a segment can be opened. The first rank that
// needs a segment creates it and posts a notice; the last one to open it removes the notice.

#include <atomic>
#include <cstdint>
#include <functional>

#include "comm/shared/counters.h"
#include "comm/shared/segment.h"

namespace shardstep::detail {

struct Notice {
  int64_t key;    // 0: free
  int64_t maker;  // the rank that has posted it
  SegmentOffer offer;
  int64_t error;    // why there is none
  int64_t to_come;  // ranks that have not opened it yet
};

struct NoticeBoard {
  static constexpr int kNotices = 256;  // also the descriptors that a rank keeps open

  Bell changed;
  std::atomic<uint32_t> holder;  // of the lock: a rank + 1; 0: none
  std::atomic<uint32_t> wanted;  // whether a rank waits for the lock
  Notice notices[kNotices];

  // REQUIRES: a lock. Null if there is none.
  Notice* find(int64_t key);
};

// Holds the board's lock for a rank, unless another rank holds it, until destroyed. A rank that
// dies with the lock loses it.
class NoticeBoardLock {
 public:
  NoticeBoardLock(NoticeBoard& board, int rank, const std::function<bool(int)>& is_gone);
  ~NoticeBoardLock();
  NoticeBoardLock(const NoticeBoardLock&) = delete;
  NoticeBoardLock& operator=(const NoticeBoardLock&) = delete;
  bool held() const { return held_; }
  // Wakes the ranks that wait for a change, when this is destroyed.
  void has_changed() { changed_ = true; }

 private:
  NoticeBoard& board_;
  bool held_ = false;
  bool changed_ = false;
};

}  // namespace shardstep::detail
