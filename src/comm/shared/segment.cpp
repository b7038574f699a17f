#include "comm/shared/segment.h"

#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <random>
#include <string>

namespace shardstep::detail {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kMark = kLine;  // bytes before the memory that others see

int64_t whole_lines(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// Retries a call that a signal interrupts.
template <class Call>
auto again_if_interrupted(Call call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

// Piece by piece, because an interrupted call releases what it had reserved.
int reserve_pages(int fd, int64_t begin, int64_t end) {
  constexpr int64_t kPiece = 64 << 20;
  while (begin < end) {
    const int64_t size = std::min(kPiece, end - begin);
    const int error = ::posix_fallocate(fd, begin, size);
    if (error == EINTR) continue;
    if (error != 0) return error;
    begin += size;
  }
  return 0;
}

int64_t random_mark() {
  std::random_device device;
  return static_cast<int64_t>((uint64_t{device()} << 32 | device()) | 1);
}

std::string memfd_name(const SegmentOffer& offer) {
  return c10::str("shardstep-", static_cast<uint64_t>(offer.mark));
}

// Checks what a descriptor refers to without opening it, which could block or have side effects.
bool links_to(const std::string& path, const SegmentOffer& offer) {
  char target[PATH_MAX];
  const auto size = ::readlink(path.c_str(), target, sizeof(target));
  return size > 0 && std::string(target, static_cast<size_t>(size)) ==
                         c10::str("/memfd:", memfd_name(offer), " (deleted)");
}

// Maps the file with the header reserved; an error if that fails.
Segment map(std::shared_ptr<const FileDescriptor> file, const SegmentLayout& layout) {
  Segment segment{nullptr, std::move(file), 0};
  segment.error = reserve_pages(segment.file->get(), 0, kMark + layout.header());
  if (segment.error != 0) return segment;
  const auto size = static_cast<size_t>(kMark + layout.bytes());
  void* address = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, segment.file->get(), 0);
  if (address == MAP_FAILED) {
    segment.error = errno;
    return segment;
  }
  segment.memory = {static_cast<std::byte*>(address) + kMark,
                    [size](std::byte* p) { ::munmap(p - kMark, size); }};
  return segment;
}

Segment failed(int error) { return {nullptr, nullptr, error}; }

}  // namespace

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

SegmentLayout::SegmentLayout(int64_t header, const std::vector<int64_t>& bytes_of_ranks)
    : begins_{whole_lines(header)} {
  for (int64_t bytes : bytes_of_ranks) begins_.push_back(begins_.back() + whole_lines(bytes));
}

int Segment::reserve(int64_t begin, int64_t end) const {
  return reserve_pages(file->get(), kMark + begin, kMark + end);
}

Segment make_segment(const SegmentLayout& layout, SegmentOffer& offer) {
  offer.mark = random_mark();
  const auto name = memfd_name(offer);
  const auto file = std::make_shared<const FileDescriptor>(again_if_interrupted([&] {
    return static_cast<int>(::syscall(SYS_memfd_create, name.c_str(), 1u /* MFD_CLOEXEC */));
  }));
  if (!*file) return failed(errno);
  if (again_if_interrupted([&] { return ::ftruncate(file->get(), kMark + layout.bytes()); }) != 0) {
    return failed(errno);
  }
  auto segment = map(file, layout);
  if (segment) std::memcpy(segment.memory.get() - kMark, &offer.mark, sizeof(offer.mark));
  offer.pid = ::getpid();
  offer.descriptor = file->get();
  return segment;
}

Segment open_segment(const SegmentOffer& offer, const SegmentLayout& layout) {
  const auto path = c10::str("/proc/", offer.pid, "/fd/", offer.descriptor);
  if (!links_to(path, offer)) return failed(ENOENT);
  const auto file = std::make_shared<const FileDescriptor>(
      again_if_interrupted([&] { return ::open(path.c_str(), O_RDWR | O_CLOEXEC); }));
  if (!*file) return failed(errno);
  // The number may refer to another file by now.
  struct stat status{};
  if (!links_to(c10::str("/proc/self/fd/", file->get()), offer) ||
      ::fstat(file->get(), &status) != 0 || status.st_size != kMark + layout.bytes()) {
    return failed(ENOENT);
  }
  auto segment = map(file, layout);
  int64_t mark = 0;
  if (segment) std::memcpy(&mark, segment.memory.get() - kMark, sizeof(mark));
  if (segment && mark != offer.mark) return failed(ENOENT);
  return segment;
}

}  // namespace shardstep::detail
