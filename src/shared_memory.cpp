#include "shared_memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>

#include "agreement.h"
#include "who.h"

namespace shardstep::detail {
namespace {

using Clock = std::chrono::steady_clock;

// What a rank tells the others about memory of its own; all zero if it has none.
struct Offer {
  int64_t pid = 0;
  int64_t descriptor = -1;
  int64_t mark = 0;  // the first word of the memory
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

std::shared_ptr<std::byte> map(int fd, int64_t bytes) {
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) return nullptr;
  return {static_cast<std::byte*>(address), [bytes](std::byte* p) { ::munmap(p, bytes); }};
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
  if (memory) std::memcpy(&mark, memory.get(), sizeof(mark));
  return mark == offer.mark ? memory : nullptr;
}

int64_t random_mark() {
  std::random_device device;
  return static_cast<int64_t>((uint64_t{device()} << 32 | device()) | 1);
}

// What rank 0 shares with everyone; null where that failed, with rank 0's errno in `error`.
// Collective.
std::shared_ptr<std::byte> share_from_first(const ProcessGroupPtr& group, int64_t bytes,
                                            int64_t& error) {
  Offer offer;
  std::shared_ptr<std::byte> memory;
  std::optional<Descriptor> fd;
  if (group->getRank() == 0) {
    fd.emplace(create(bytes, offer.error));
    if (offer.error == 0) memory = map(fd->get(), bytes);
    offer.pid = ::getpid();
    offer.descriptor = fd->get();
    offer.mark = random_mark();
    if (memory) std::memcpy(memory.get(), &offer.mark, sizeof(offer.mark));
  }
  const auto offers =
      all_gather_numbers(group, {offer.pid, offer.descriptor, offer.mark, offer.error});
  offer = {offers[0][0], offers[0][1], offers[0][2], offers[0][3]};
  error = offer.error;
  if (group->getRank() != 0 && error == 0) memory = open(offer, bytes);
  bool everyone = true;
  for (const auto& has : all_gather_numbers(group, {memory != nullptr})) {
    everyone = everyone && has[0] != 0;
  }
  if (!everyone) return nullptr;
  // Nobody looks at the mark again before all ranks have come here.
  all_gather_numbers(group, {0});
  if (group->getRank() == 0) std::memset(memory.get(), 0, sizeof(offer.mark));
  all_gather_numbers(group, {0});
  return memory;
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

SharedMemory::SharedMemory(const ProcessGroupPtr& group)
    : group_(group), timeout_(timeout_of(group)) {}

std::shared_ptr<SharedMemory> SharedMemory::connect(const ProcessGroupPtr& group) {
  std::shared_ptr<SharedMemory> shared(new SharedMemory(group));
  int64_t error = 0;
  const auto size = static_cast<int64_t>(sizeof(SharedCount)) * group->getSize();
  shared->control_ = share_from_first(group, size, error);
  if (!shared->control_) return nullptr;
  auto* counts = reinterpret_cast<SharedCount*>(shared->control_.get());
  for (const auto& pid : all_gather_numbers(group, {::getpid()})) {
    shared->bells_.push_back(counts + shared->pids_.size());
    shared->pids_.push_back(pid[0]);
    shared->process_handles_.push_back(
        static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(pid[0]), 0u)));
  }
  return shared;
}

SharedMemory::~SharedMemory() {
  for (int handle : process_handles_) {
    if (handle >= 0) ::close(handle);
  }
}

std::shared_ptr<std::byte> SharedMemory::allocate(int64_t bytes) {
  int64_t error = 0;
  auto memory = share_from_first(group_, std::max<int64_t>(bytes, sizeof(int64_t)), error);
  TORCH_CHECK(memory, "shardstep: expected room for ", bytes,
              " bytes of shared memory on this host, got: ",
              error ? std::strerror(static_cast<int>(error)) : "a rank could not map it",
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
  auto& bell = bells_[group_->getRank()]->value;
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
  constexpr auto kLook = std::chrono::milliseconds(100);  // for ranks that are gone
  constexpr auto kPatience = std::chrono::seconds(2);     // with one that waits for another
  const auto begin = Clock::now();
  auto& bell = bells_[rank]->value;
  for (;;) {
    const uint32_t rung = bell.load(std::memory_order_acquire);
    if (reached(count, value)) return;
    if (const auto lost = who_is_gone(rank, Clock::now() - begin > kPatience)) {
      // It may have raised the count before it went.
      if (reached(count, value)) return;
      TORCH_CHECK(false, "shardstep: rank ", *lost, " (process ", pids_[*lost],
                  ") is gone, while waiting for ", what(), " of rank ", rank, who(group_));
    }
    TORCH_CHECK(Clock::now() < begin + timeout_, "shardstep: waited ", timeout_.count(), " ms for ",
                what(), " of rank ", rank, who(group_));
    futex_wait(bell, rung, kLook);
  }
}

}  // namespace shardstep::detail
