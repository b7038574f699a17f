#include "comm/shared/shared_memory.h"

#include <ATen/ATen.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "comm/agreement.h"
#include "launch/who.h"

namespace shardstep::detail {
namespace {

using Clock = std::chrono::steady_clock;

std::vector<std::vector<int64_t>> all_gather_numbers(const ProcessGroupPtr& group,
                                                     const std::vector<int64_t>& own) {
  std::vector<std::vector<int64_t>> numbers;
  for (const auto& tensor : all_gather(group, at::tensor(own, at::kLong))) {
    const auto* data = tensor.const_data_ptr<int64_t>();
    numbers.emplace_back(data, data + tensor.numel());
  }
  return numbers;
}

// A segment that rank 0 makes and every rank opens; none if one cannot. Collective.
Segment share_from_first(const ProcessGroupPtr& group, const SegmentLayout& layout) {
  SegmentOffer offer;
  Segment segment;
  if (group->getRank() == 0) segment = make_segment(layout, offer);
  const auto offers = all_gather_numbers(group, {offer.pid, offer.descriptor, offer.mark});
  offer = {offers[0][0], offers[0][1], offers[0][2]};
  if (group->getRank() != 0) segment = open_segment(offer, layout);
  for (const auto& has : all_gather_numbers(group, {segment ? 1 : 0})) {
    if (has[0] == 0) return {};
  }
  return segment;
}

std::chrono::milliseconds timeout_of(const ProcessGroupPtr& group) {
  try {
    return group->getBackend(at::kCPU)->getBackendOptions()->timeout;
  } catch (const c10::Error&) {
    return kProcessGroupDefaultTimeout;
  }
}

}  // namespace

SharedMemory::SharedMemory(const ProcessGroupPtr& group)
    : group_(group), timeout_(timeout_of(group)) {}

SharedMemory::~SharedMemory() = default;

std::shared_ptr<SharedMemory> SharedMemory::connect(const ProcessGroupPtr& group) {
  std::shared_ptr<SharedMemory> shared(new SharedMemory(group));
  const auto ranks = static_cast<int64_t>(sizeof(Rank)) * group->getSize();
  shared->control_ =
      share_from_first(group, SegmentLayout(ranks + static_cast<int64_t>(sizeof(NoticeBoard))));
  if (!shared->control_) return nullptr;
  std::byte* const memory = shared->control_.memory.get();
  shared->ranks_ = reinterpret_cast<Rank*>(memory);
  shared->board_ = reinterpret_cast<NoticeBoard*>(memory + ranks);
  shared->control_.file.reset();
  for (const auto& pid : all_gather_numbers(group, {::getpid()})) {
    shared->pids_.push_back(pid[0]);
    shared->processes_.emplace_back(
        static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(pid[0]), 0u)));
  }
  return shared;
}

void SharedMemory::close_what_all_have_opened() {
  std::erase_if(offered_, [&](const auto& offer) { return board_->find(offer.first) == nullptr; });
}

// Neither memory nor an error if there is no room on the board.
Segment SharedMemory::find_or_make(NoticeBoardLock& lock, int64_t key,
                                   const SegmentLayout& layout) {
  close_what_all_have_opened();
  if (auto* notice = board_->find(key)) {
    auto segment = notice->error == 0 ? open_segment(notice->offer, layout)
                                      : Segment{nullptr, nullptr, static_cast<int>(notice->error)};
    if (--notice->to_come == 0) {
      notice->key = 0;
      lock.has_changed();
    }
    return segment;
  }
  auto* const vacant = board_->find(0);
  if (!vacant) return {};
  auto segment = make_segment(layout, vacant->offer);
  vacant->error = segment.error;
  vacant->to_come = world_size() - 1;
  vacant->key = key;
  lock.has_changed();
  if (segment) offered_[key] = segment.file;
  return segment;
}

Segment SharedMemory::allocate(int64_t key, const SegmentLayout& layout, ReserveOwn reserve_own) {
  TORCH_INTERNAL_ASSERT(key != 0);
  Segment segment;
  const auto done = [&] {
    NoticeBoardLock lock(*board_, rank(), [this](int holder) { return is_gone(holder); });
    if (lock.held()) segment = find_or_make(lock, key, layout);
    return segment || segment.error != 0;
  };
  wait_until(done, {board_->changed, [] { return 0; },
                    [] { return std::string("a turn to share memory"); }});
  if (segment && reserve_own == ReserveOwn::kNow && layout.bytes() > layout.header()) {
    segment.error = segment.reserve(layout.begin(rank()), layout.end(rank()));
  }
  if (segment.error != 0) throw_no_room(layout.bytes(), segment.error);
  return segment;
}

void SharedMemory::throw_no_room(int64_t bytes, int error) {
  const auto lost = who_is_gone(-1, /*anyone=*/true);
  TORCH_CHECK(!lost, "shardstep: rank ", *lost, " (process ", pids_[*lost],
              ") is gone, and its memory with it", who(group_));
  const auto message = c10::str("expected room for ", bytes,
                                " bytes of shared memory on this host, got: ", std::strerror(error),
                                "; free memory, or use exchange \"pairwise\"");
  give_up(message);
  TORCH_CHECK(false, "shardstep: ", message, who(group_));
}

bool SharedMemory::is_gone(int rank) const {
  if (rank < 0 || rank >= world_size() || !processes_[rank]) return false;
  pollfd handle{processes_[rank].get(), POLLIN, 0};
  return ::poll(&handle, 1, 0) == 1;
}

std::optional<int> SharedMemory::who_is_gone(int awaited, bool anyone) const {
  if (is_gone(awaited)) return awaited;
  for (int rank = 0; anyone && rank < world_size(); ++rank) {
    if (is_gone(rank)) return rank;
  }
  return std::nullopt;
}

void SharedMemory::raise(SharedCount& count) {
  count.raise();
  ranks_[rank()].raised.ring();
}

void SharedMemory::wait(const SharedCount& count, uint32_t value, int rank,
                        const std::function<std::string()>& what) {
  // About as long as a wake-up takes; more would take the core from ranks that have work.
  for (int i = 0; i < 1000; ++i) {
    if (count.reached(value)) return;
    spin_pause();
  }
  wait_until([&] { return count.reached(value); },
             {ranks_[rank].raised, [rank] { return rank; }, what});
}

void SharedMemory::wait_until(const std::function<bool()>& reached, const Waiting& waiting) {
  constexpr auto kPatience = std::chrono::seconds(2);  // with one that waits for another
  const auto begin = Clock::now();
  for (;;) {
    const uint32_t heard = waiting.bell.heard();
    if (reached()) return;
    check_nobody_gave_up();
    const auto waited = Clock::now() - begin;
    const int rank = waiting.awaited();
    if (const auto lost = who_is_gone(rank, waited > kPatience)) {
      // It may have done its part before it went.
      if (reached()) return;
      TORCH_CHECK(false, "shardstep: rank ", *lost, " (process ", pids_[*lost],
                  ") is gone, while waiting for ", waiting.what(), " of rank ", rank, who(group_));
    }
    TORCH_CHECK(waited < timeout_, "shardstep: waited ", timeout_.count(), " ms for ",
                waiting.what(), " of rank ", rank, who(group_));
    waiting.bell.wait(heard, waiting.look);
  }
}

void SharedMemory::give_up(const std::string& message) {
  auto& own = ranks_[rank()];
  if (own.gave_up.load() != 0) return;
  const size_t size = std::min(message.size(), Rank::kMessage - 1);
  std::memcpy(own.message, message.data(), size);
  own.message[size] = '\0';
  own.gave_up.store(1, std::memory_order_release);
  for (int rank = 0; rank < world_size(); ++rank) {
    ranks_[rank].raised.ring();
    ranks_[rank].mail.ring();
  }
  board_->changed.ring();
}

void SharedMemory::check_nobody_gave_up() const {
  for (int rank = 0; rank < world_size(); ++rank) {
    const auto& other = ranks_[rank];
    if (other.gave_up.load(std::memory_order_acquire) == 0) continue;
    const std::string message(other.message, ::strnlen(other.message, Rank::kMessage));
    TORCH_CHECK(false, "shardstep: rank ", rank, " gave up: ", message, who(group_));
  }
}

}  // namespace shardstep::detail
