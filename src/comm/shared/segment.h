#pragma once

// Memory that one process creates and others open. It has no name in the file system and vanishes
// with the last process that maps it, also after kill -9. Memory is reserved before it is touched,
// so a lack of memory is an error here and never a SIGBUS later.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace shardstep::detail {

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  ~FileDescriptor();
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  FileDescriptor& operator=(FileDescriptor&&) = delete;
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

// A header that all ranks write to, and a range of bytes per rank, which only that rank reserves,
// so that its pages are local to it.
class SegmentLayout {
 public:
  explicit SegmentLayout(int64_t header, const std::vector<int64_t>& bytes_of_ranks = {});
  int64_t header() const { return begins_.front(); }
  int64_t begin(int rank) const { return begins_[rank]; }
  int64_t end(int rank) const { return begins_[rank + 1]; }
  int64_t bytes() const { return begins_.back(); }

 private:
  std::vector<int64_t> begins_;
};

// How another process finds a segment.
struct SegmentOffer {
  int64_t pid = 0;
  int64_t descriptor = -1;
  int64_t mark = 0;  // identifies the segment, and is stored in it
};

// Mapped into this process during the lifetime of `memory`.
struct Segment {
  std::shared_ptr<std::byte> memory;
  std::shared_ptr<const FileDescriptor> file;
  int error = 0;  // an errno if there is no memory

  explicit operator bool() const { return memory != nullptr; }
  // Reserves a range of bytes. Returns zero or an errno.
  int reserve(int64_t begin, int64_t end) const;
};

// With the header reserved. It can be opened as long as `file` is open.
Segment make_segment(const SegmentLayout& layout, SegmentOffer& offer);

// With the header reserved. An error if `offer` is not a segment of ours of that size, which
// happens if processes in two containers have the same ID; then nothing is mapped or written.
Segment open_segment(const SegmentOffer& offer, const SegmentLayout& layout);

}  // namespace shardstep::detail
