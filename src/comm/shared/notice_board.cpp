#include "comm/shared/notice_board.h"

namespace shardstep::detail {

Notice* NoticeBoard::find(int64_t key) {
  for (auto& notice : notices) {
    if (notice.key == key) return &notice;
  }
  return nullptr;
}

NoticeBoardLock::NoticeBoardLock(NoticeBoard& board, int rank,
                                 const std::function<bool(int)>& is_gone)
    : board_(board) {
  const auto own = static_cast<uint32_t>(rank) + 1;
  const auto take = [&](uint32_t from) {
    return board_.holder.compare_exchange_strong(from, own, std::memory_order_acquire);
  };
  held_ = take(0);
  if (held_) return;
  board_.wanted.store(1);
  const uint32_t holder = board_.holder.load();
  held_ = take(0) || (holder != 0 && is_gone(static_cast<int>(holder) - 1) && take(holder));
}

NoticeBoardLock::~NoticeBoardLock() {
  if (!held_) return;
  board_.holder.store(0);
  if (board_.wanted.exchange(0) != 0 || changed_) board_.changed.ring();
}

}  // namespace shardstep::detail
