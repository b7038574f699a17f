#include "comm/shared/shared_memory.h"

#include <ATen/ATen.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <tuple>

#include "comm/agreement.h"
#include "comm/control_group.h"
#include "failure_points.h"
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

// The host that a test says a rank is on; 0 if it does not say.
int64_t host_in_test(int rank) {
  const char* const names = std::getenv("SHARDSTEP_TEST_HOSTS");
  if (!names) return 0;
  std::istringstream all(names);
  std::string name, next;
  for (int i = 0; i <= rank && std::getline(all, next, ','); ++i) name = next;
  return static_cast<int64_t>(std::hash<std::string>()(name));
}

}  // namespace

SharedMemory::SharedMemory(const ProcessGroupPtr& group)
    : group_(group), timeout_(timeout_of(group)) {}

SharedMemory::~SharedMemory() = default;

std::shared_ptr<SharedMemory> SharedMemory::connect(const ProcessGroupPtr& group) {
  const int self = group->getRank(), size = group->getSize();
  std::shared_ptr<SharedMemory> shared(new SharedMemory(group));
  const SegmentLayout layout(control_bytes(size));
  SegmentOffer offer;
  std::vector<Segment> opened(size);
  opened[self] = make_segment(layout, offer);
  const auto offers = all_gather_numbers(
      group, {opened[self] ? 1 : 0, host_in_test(self), offer.pid, offer.descriptor, offer.mark});
  std::vector<int64_t> opens(size);
  for (int rank = 0; rank < size; ++rank) {
    const auto& [exists, host, pid, descriptor, mark] = std::tie(
        offers[rank][0], offers[rank][1], offers[rank][2], offers[rank][3], offers[rank][4]);
    if (exists == 0) return nullptr;
    if (rank != self && host == offers[self][1]) {
      opened[rank] = open_segment({pid, descriptor, mark}, layout);
    }
    opens[rank] = opened[rank] ? 1 : 0;
    shared->pids_.push_back(pid);
  }
  std::vector<std::vector<bool>> who_opens;
  for (const auto& row : all_gather_numbers(group, opens)) {
    who_opens.emplace_back(row.begin(), row.end());
  }
  auto hosts = group_by_host(who_opens);
  auto control = opened[hosts.ranks[hosts.of(self)].front()];
  shared->join(std::move(hosts), std::move(control));
  SHARDSTEP_FAILURE_POINT("memory: connected");
  return shared;
}

int64_t SharedMemory::control_bytes(int ranks) {
  return static_cast<int64_t>(sizeof(Rank)) * ranks + static_cast<int64_t>(sizeof(NoticeBoard));
}

// The control block is that of the host's first rank.
void SharedMemory::join(Hosts hosts, Segment control) {
  hosts_ = std::move(hosts);
  host_ = hosts_.of(group_->getRank());
  const auto& ranks = group_ranks();
  rank_ =
      static_cast<int>(std::find(ranks.begin(), ranks.end(), group_->getRank()) - ranks.begin());
  control_ = std::move(control);
  control_.file.reset();
  std::byte* const memory = control_.memory.get();
  ranks_ = reinterpret_cast<Rank*>(memory);
  board_ = reinterpret_cast<NoticeBoard*>(memory + sizeof(Rank) * group_->getSize());
  std::vector<int64_t> pids;
  for (int rank : ranks) pids.push_back(pids_[rank]);
  pids_ = std::move(pids);
  for (int64_t pid : pids_) {
    processes_.emplace_back(
        static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0u)));
  }
}

std::string SharedMemory::name_of(int rank) const {
  return c10::str("rank ", group_ranks()[rank], " (process ", pids_[rank], ")");
}

void SharedMemory::close_what_all_have_opened() {
  std::erase_if(offered_, [&](const auto& offer) { return board_->find(offer.first) == nullptr; });
}

// Throws if it cannot be what its maker has posted.
void SharedMemory::check_notice(const Notice& notice) {
  constexpr int64_t kMostErrno = 4095;
  PeerInput(group_, giver_up())
      .check("the maker of shared memory", notice.maker, 0, world_size() - 1);
  const auto maker = input_of(static_cast<int>(notice.maker));
  maker.check("the error of shared memory", notice.error, 0, kMostErrno);
  maker.check("the ranks that have yet to open shared memory", notice.to_come, 1, world_size() - 1);
  if (notice.error != 0) return;
  maker.require(notice.offer.pid == pids_[notice.maker],
                "an offer of another process's shared memory");
  maker.check("the descriptor of shared memory", notice.offer.descriptor, 0, INT_MAX);
}

void SharedMemory::explain_missing(int maker) {
  // A process that is killed closes its files a moment before it is known to be gone.
  constexpr std::chrono::milliseconds kMoment{2000};
  await_a_death(kMoment);
  if (who_is_gone(maker, /*anyone=*/true)) return;
  check_nobody_gave_up();
  fail(c10::str(name_of(maker),
                " has no longer, or never had, the shared memory that it offers; its optimizer may "
                "be gone, its memory damaged, or it runs another version"));
}

int SharedMemory::board_holder() {
  const int64_t holder = board_->holder.load();
  PeerInput(group_, giver_up()).check("the holder of the notice board", holder, 0, world_size());
  return static_cast<int>(holder) - 1;
}

// Neither memory nor an error if there is no room on the board.
Segment SharedMemory::find_or_make(NoticeBoardLock& lock, int64_t key, const SegmentLayout& layout,
                                   int& maker) {
  close_what_all_have_opened();
  if (auto* notice = board_->find(key)) {
    check_notice(*notice);
    maker = static_cast<int>(notice->maker);
    auto segment = notice->error == 0 ? open_segment(notice->offer, layout)
                                      : Segment{nullptr, nullptr, static_cast<int>(notice->error)};
    SHARDSTEP_FAILURE_POINT("segment: opened");
    if (--notice->to_come == 0) {
      notice->key = 0;
      lock.has_changed();
    }
    return segment;
  }
  auto* const vacant = board_->find(0);
  if (!vacant) return {};
  auto segment = make_segment(layout, vacant->offer);
  vacant->maker = maker = rank();
  vacant->error = segment.error;
  vacant->to_come = world_size() - 1;
  SHARDSTEP_FAILURE_POINT("segment: made");
  vacant->key = key;
  SHARDSTEP_FAILURE_POINT("segment: offered");
  lock.has_changed();
  if (segment) offered_[key] = segment.file;
  return segment;
}

Segment SharedMemory::allocate(int64_t key, const SegmentLayout& layout, ReserveOwn reserve_own) {
  TORCH_INTERNAL_ASSERT(key != 0);
  Segment segment;
  SegmentOffer to_nobody;
  int maker = rank();
  const auto done = [&] {
    NoticeBoardLock lock(*board_, rank(), [this](int holder) { return is_gone(holder); });
    if (lock.held()) segment = find_or_make(lock, key, layout, maker);
    return segment || segment.error != 0;
  };
  if (world_size() == 1) {
    segment = make_segment(layout, to_nobody);
  } else {
    wait_until(done, {board_->changed, [this] { return board_holder(); },
                      [] { return std::string("a turn to share memory"); }});
  }
  if (segment && reserve_own == ReserveOwn::kNow && layout.bytes() > layout.header()) {
    segment.error = segment.reserve(layout.begin(rank()), layout.end(rank()));
  }
  if (segment.error == ENOENT) explain_missing(maker);
  if (segment.error != 0) throw_no_room(layout.bytes(), segment.error);
  return segment;
}

void SharedMemory::throw_no_room(int64_t bytes, int error) {
  const auto lost = who_is_gone(-1, /*anyone=*/true);
  TORCH_CHECK(!lost, "shardstep: ", name_of(*lost), " has died, and its memory is gone",
              who(group_));
  fail(c10::str("expected room for ", bytes, " bytes of shared memory on this host, got: ",
                std::strerror(error), "; free memory, or use exchange \"pairwise\""));
}

void SharedMemory::fail(const std::string& message) {
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

void SharedMemory::await_a_death(std::chrono::milliseconds patience) const {
  std::vector<pollfd> handles;
  for (const auto& process : processes_) handles.push_back({process.get(), POLLIN, 0});
  ::poll(handles.data(), handles.size(), static_cast<int>(patience.count()));
}

void SharedMemory::raise(SharedCount& count) {
  count.raise();
  ranks_[rank()].raised.ring();
}

void SharedMemory::wait(const SharedCount& count, uint32_t value, int rank,
                        const std::function<std::string()>& what) {
  // About as long as a wake-up takes; more would take the core away from ranks that have work.
  for (int i = 0; i < 1000; ++i) {
    if (count.reached(value)) return;
    spin_pause();
  }
  wait_until([&] { return count.reached(value); },
             {ranks_[rank].raised, [rank] { return rank; }, what});
}

void SharedMemory::check_count(const SharedCount& count, uint32_t most, int rank) {
  const auto value = count.value.load(std::memory_order_acquire);
  input_of(rank).require(static_cast<int32_t>(most - value) >= 0, "a count that cannot be");
}

// Modelled in proofs/waiting.pml, as are raise() and give_up().
void SharedMemory::wait_until(const std::function<bool()>& reached, const Waiting& waiting) {
  constexpr auto kPatience = std::chrono::seconds(2);  // with one that waits for another
  const auto begin = Clock::now();
  const auto of_rank = [&](int rank) {
    return rank < 0 ? std::string() : c10::str(" of rank ", group_ranks()[rank]);
  };
  for (;;) {
    const uint32_t heard = waiting.bell.heard();
    if (reached()) return;
    check_nobody_gave_up();
    const auto waited = Clock::now() - begin;
    const int rank = waiting.awaited();
    if (const auto lost = who_is_gone(rank, waited > kPatience)) {
      // It may have done its part before it died.
      if (reached()) return;
      TORCH_CHECK(false, "shardstep: ", name_of(*lost), " has died, while waiting for ",
                  waiting.what(), of_rank(rank), who(group_));
    }
    if (waited >= timeout_) {
      fail(c10::str("waited ", timeout_.count(), " ms for ", waiting.what(), of_rank(rank)));
    }
    waiting.bell.wait(heard, waiting.look);
  }
}

void SharedMemory::give_up(const std::string& message) {
  const std::lock_guard lock(giving_up_);
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

void SharedMemory::start_anew() {
  ranks_[rank()].gave_up.store(0, std::memory_order_release);
  offered_.clear();
  if (rank() != 0) return;
  const NoticeBoardLock lock(*board_, rank(), [this](int holder) { return is_gone(holder); });
  // A rank that died holds it, or one that has not heard of that: nobody will use this again.
  if (!lock.held()) return;
  for (auto& notice : board_->notices) notice.key = 0;
}

void SharedMemory::check_nobody_gave_up() const {
  for (int rank = 0; rank < world_size(); ++rank) {
    const auto& other = ranks_[rank];
    if (other.gave_up.load(std::memory_order_acquire) == 0) continue;
    const std::string message(other.message, ::strnlen(other.message, Rank::kMessage));
    TORCH_CHECK(false, "shardstep: rank ", group_ranks()[rank], " gave up: ", message, who(group_));
  }
}

}  // namespace shardstep::detail
