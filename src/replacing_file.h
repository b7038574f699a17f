#pragma once

// A file that takes the place of another in one move, or not at all: bytes go to a temporary file
// beside it. Not thread-safe; several may write to one path, the last to commit stays.

#include <cstddef>
#include <string>

namespace shardstep::detail {

class ReplacingFile {
 public:
  explicit ReplacingFile(const std::string& path);
  ReplacingFile(const ReplacingFile&) = delete;
  ReplacingFile& operator=(const ReplacingFile&) = delete;
  // Drops what was written, unless it was committed.
  ~ReplacingFile();

  // Remembers a failure for check() instead of throwing; after one, bytes are dropped.
  void write(const void* data, size_t size) noexcept;
  // Throws what went wrong in write().
  void check() const;
  // Makes what was written the file, durably.
  void commit();

 private:
  [[noreturn]] void fail(const char* what, int error) const;

  std::string path_;
  std::string temporary_;
  int descriptor_ = -1;
  int write_error_ = 0;
};

}  // namespace shardstep::detail
