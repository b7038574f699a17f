#include "comm/shared/shared_memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>

#include "comm/agreement.h"
#include "launch/who.h"

namespace shardstep::detail {
namespace {

using Clock = std::chrono::steady_clock;

// What a rank tells the others about memory of its own; all zero if it has none.
struct Offer {
  int64_t pid = 0;
  int64_t descriptor = -1;
  int64_t mark = 0;  // a word behind the memory
  int64_t error = 0;
};

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  Descriptor& operator=(Descriptor&&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

std::vector<std::vector<int64_t>> all_gather_numbers(const ProcessGroupPtr& group,
                                                     const std::vector<int64_t>& own) {
  std::vector<std::vector<int64_t>> numbers;
  for (const auto& tensor : all_gather(group, at::tensor(own, at::kLong))) {
    const auto* data = tensor.const_data_ptr<int64_t>();
    numbers.emplace_back(data, data + tensor.numel());
  }
  return numbers;
}

constexpr int64_t kMark = sizeof(Offer::mark);

// With room for the mark.
std::shared_ptr<std::byte> map(int fd, int64_t bytes) {
  const auto size = static_cast<size_t>(bytes + kMark);
  void* address = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) return nullptr;
  return {static_cast<std::byte*>(address), [size](std::byte* p) { ::munmap(p, size); }};
}

// Memory of this process, with its room reserved: else a full disk of memory would be a SIGBUS
// later.
Descriptor create(int64_t bytes, int64_t& error) {
  Descriptor fd(static_cast<int>(::syscall(SYS_memfd_create, "shardstep", 1u /* MFD_CLOEXEC */)));
  error = fd ? ::posix_fallocate(fd.get(), 0, bytes) : errno;
  return fd;
}

// Memory of another process, if it can be opened and is what was offered.
std::shared_ptr<std::byte> open(const Offer& offer, int64_t bytes) {
  const auto path = c10::str("/proc/", offer.pid, "/fd/", offer.descriptor);
  const Descriptor fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd) return nullptr;
  auto memory = map(fd.get(), bytes);
  int64_t mark = 0;
  if (memory) std::memcpy(&mark, memory.get() + bytes, sizeof(mark));
  return mark == offer.mark ? memory : nullptr;
}

int64_t random_mark() {
  std::random_device device;
  return static_cast<int64_t>((uint64_t{device()} << 32 | device()) | 1);
}

// Null, and an errno in the offer, if there is no room. The memory can be opened as long as `fd`.
std::shared_ptr<std::byte> make_offer(int64_t bytes, Offer& offer, std::optional<Descriptor>& fd) {
  std::shared_ptr<std::byte> memory;
  fd.emplace(create(bytes + kMark, offer.error));
  if (offer.error == 0) memory = map(fd->get(), bytes);
  offer.pid = ::getpid();
  offer.descriptor = fd->get();
  offer.mark = random_mark();
  if (memory) std::memcpy(memory.get() + bytes, &offer.mark, sizeof(offer.mark));
  return memory;
}

// Memory of `bytes` that rank 0 makes and every rank opens; null if one cannot. Collective.
std::shared_ptr<std::byte> share_from_first(const ProcessGroupPtr& group, int64_t bytes) {
  Offer offer;
  std::shared_ptr<std::byte> memory;
  std::optional<Descriptor> fd;
  if (group->getRank() == 0) memory = make_offer(bytes, offer, fd);
  const auto offers = all_gather_numbers(group, {offer.pid, offer.descriptor, offer.mark});
  offer = {offers[0][0], offers[0][1], offers[0][2]};
  if (group->getRank() != 0) memory = open(offer, bytes);
  bool everyone = true;
  for (const auto& has : all_gather_numbers(group, {memory != nullptr})) {
    everyone = everyone && has[0] != 0;
  }
  return everyone ? memory : nullptr;
}

std::chrono::milliseconds timeout_of(const ProcessGroupPtr& group) {
  try {
    return group->getBackend(at::kCPU)->getBackendOptions()->timeout;
  } catch (const c10::Error&) {
    return kProcessGroupDefaultTimeout;
  }
}

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, std::chrono::nanoseconds limit) {
  const timespec time{static_cast<time_t>(limit.count() / 1000000000), limit.count() % 1000000000};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, expected, &time, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

}  // namespace

// Where memory can be opened that some rank has made.
struct SharedMemory::Notice {
  int64_t key;  // 0: free
  Offer offer;
  int64_t to_come;  // ranks that have not opened it yet
};

struct SharedMemory::Board {
  std::atomic<uint32_t> locked;
  Notice notices[256];  // descriptors that a rank keeps open; it waits when there are more
};

SharedMemory::SharedMemory(const ProcessGroupPtr& group)
    : group_(group), timeout_(timeout_of(group)) {}

std::shared_ptr<SharedMemory> SharedMemory::connect(const ProcessGroupPtr& group) {
  std::shared_ptr<SharedMemory> shared(new SharedMemory(group));
  const auto bells = static_cast<int64_t>(sizeof(SharedCount)) * group->getSize();
  shared->control_ = share_from_first(group, bells + static_cast<int64_t>(sizeof(Board)));
  if (!shared->control_) return nullptr;
  auto* counts = reinterpret_cast<SharedCount*>(shared->control_.get());
  shared->board_ = reinterpret_cast<Board*>(shared->control_.get() + bells);
  for (const auto& pid : all_gather_numbers(group, {::getpid()})) {
    shared->bells_.push_back(counts + shared->pids_.size());
    shared->pids_.push_back(pid[0]);
    shared->process_handles_.push_back(
        static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(pid[0]), 0u)));
  }
  return shared;
}

SharedMemory::~SharedMemory() {
  for (const auto& [key, fd] : offered_) ::close(fd);
  for (int handle : process_handles_) {
    if (handle >= 0) ::close(handle);
  }
}

// REQUIRES: the board is locked. Says whether there was a notice to be had.
bool SharedMemory::find_or_make(int64_t key, int64_t bytes, std::shared_ptr<std::byte>& memory,
                                int& error) {
  Notice* found = nullptr;
  Notice* vacant = nullptr;
  std::map<int64_t, int> still_offered;
  for (auto& notice : board_->notices) {
    if (notice.key == key) found = &notice;
    if (notice.key == 0) vacant = &notice;
    if (const auto own = offered_.find(notice.key); own != offered_.end()) {
      still_offered.insert(offered_.extract(own));
    }
  }
  for (const auto& [opened, fd] : offered_) ::close(fd);
  offered_ = std::move(still_offered);

  if (found) {
    error = static_cast<int>(found->offer.error);
    if (error == 0) memory = open(found->offer, bytes);
    if (--found->to_come == 0) found->key = 0;
    return true;
  }
  if (!vacant) return false;
  std::optional<Descriptor> fd;
  memory = make_offer(bytes, vacant->offer, fd);
  error = static_cast<int>(vacant->offer.error);
  vacant->to_come = static_cast<int64_t>(bells_.size()) - 1;
  vacant->key = key;
  if (memory) offered_[key] = fd->release();
  return true;
}

std::shared_ptr<std::byte> SharedMemory::allocate(int64_t key, int64_t bytes) {
  TORCH_INTERNAL_ASSERT(key != 0);
  std::shared_ptr<std::byte> memory;
  int error = 0;
  const auto done = [&] {
    if (board_->locked.exchange(1, std::memory_order_acquire) != 0) return false;
    const bool found = find_or_make(key, bytes, memory, error);
    board_->locked.store(0, std::memory_order_release);
    ring(0);
    return found;
  };
  wait_until(done, 0, [] { return std::string("a turn to share memory"); });
  if (!memory && error == 0) {
    const auto lost = who_is_gone(-1, /*anyone=*/true);
    TORCH_CHECK(!lost, "shardstep: rank ", *lost, " (process ", pids_[*lost],
                ") is gone, and its memory with it", who(group_));
  }
  TORCH_CHECK(memory, "shardstep: expected room for ", bytes,
              " bytes of shared memory on this host, got: ",
              error ? std::strerror(error) : "memory that this rank cannot map",
              "; free memory, or use exchange \"pairwise\"", who(group_));
  return memory;
}

std::optional<int> SharedMemory::who_is_gone(int awaited, bool anyone) const {
  for (int rank = 0; rank < static_cast<int>(process_handles_.size()); ++rank) {
    if (process_handles_[rank] < 0 || (rank != awaited && !anyone)) continue;
    pollfd handle{process_handles_[rank], POLLIN, 0};
    if (::poll(&handle, 1, 0) == 1) return rank;
  }
  return std::nullopt;
}

void SharedMemory::raise(SharedCount& count) {
  count.value.fetch_add(1, std::memory_order_release);
  ring(group_->getRank());
}

void SharedMemory::ring(int rank) {
  auto& bell = bells_[rank]->value;
  bell.fetch_add(1, std::memory_order_release);
  futex_wake_all(bell);
}

void SharedMemory::wait(const SharedCount& count, uint32_t value, int rank,
                        const std::function<std::string()>& what) {
  // About as long as a wake-up takes; more would take the core from ranks that have work.
  for (int i = 0; i < 1000; ++i) {
    if (reached(count, value)) return;
    pause();
  }
  wait_until([&] { return reached(count, value); }, rank, what);
}

bool SharedMemory::reaches(const SharedCount& count, uint32_t value, int rank,
                           Clock::time_point end) {
  auto& bell = bells_[rank]->value;
  for (;;) {
    const uint32_t rung = bell.load(std::memory_order_acquire);
    if (reached(count, value)) return true;
    const auto left = end - Clock::now();
    if (left <= Clock::duration::zero()) return false;
    futex_wait(bell, rung, left);
  }
}

void SharedMemory::wait_until(const std::function<bool()>& reached, int rank,
                              const std::function<std::string()>& what) {
  constexpr auto kLook = std::chrono::milliseconds(100);  // for ranks that are gone
  constexpr auto kPatience = std::chrono::seconds(2);     // with one that waits for another
  const auto begin = Clock::now();
  auto& bell = bells_[rank]->value;
  for (;;) {
    const uint32_t rung = bell.load(std::memory_order_acquire);
    if (reached()) return;
    if (const auto lost = who_is_gone(rank, Clock::now() - begin > kPatience)) {
      // It may have raised the count before it went.
      if (reached()) return;
      TORCH_CHECK(false, "shardstep: rank ", *lost, " (process ", pids_[*lost],
                  ") is gone, while waiting for ", what(), " of rank ", rank, who(group_));
    }
    TORCH_CHECK(Clock::now() < begin + timeout_, "shardstep: waited ", timeout_.count(), " ms for ",
                what(), " of rank ", rank, who(group_));
    futex_wait(bell, rung, kLook);
  }
}

}  // namespace shardstep::detail
