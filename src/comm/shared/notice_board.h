#pragma once

// A board in shared memory on which ranks say where a segment can be opened. Whoever needs one
// first makes it and puts up a notice; who opened it last takes the notice down.

#include <atomic>
#include <cstdint>
#include <functional>

#include "comm/shared/counters.h"
#include "comm/shared/segment.h"

namespace shardstep::detail {

struct Notice {
  int64_t key;  // 0: free
  SegmentOffer offer;
  int64_t error;    // why there is none
  int64_t to_come;  // ranks that have not opened it yet
};

struct NoticeBoard {
  static constexpr int kNotices = 256;  // also the descriptors that a rank keeps open

  Bell changed;
  std::atomic<uint32_t> holder;  // of the lock: a rank + 1; 0: nobody
  std::atomic<uint32_t> wanted;  // whether somebody waits for the lock
  Notice notices[kNotices];

  // REQUIRES: a lock. Null if there is none.
  Notice* find(int64_t key);
};

// Holds the board of a rank unless another one does, which the destructor ends. A rank that died
// with the lock loses it.
class NoticeBoardLock {
 public:
  NoticeBoardLock(NoticeBoard& board, int rank, const std::function<bool(int)>& is_gone);
  ~NoticeBoardLock();
  NoticeBoardLock(const NoticeBoardLock&) = delete;
  NoticeBoardLock& operator=(const NoticeBoardLock&) = delete;
  bool held() const { return held_; }
  // Wakes those that wait for a change, once this ends.
  void has_changed() { changed_ = true; }

 private:
  NoticeBoard& board_;
  bool held_ = false;
  bool changed_ = false;
};

}  // namespace shardstep::detail
