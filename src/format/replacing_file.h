#pragma once

// A file that replaces another atomically, or not at all: bytes go to a temporary file beside it.
// Not thread-safe; several may write to one path, and the last to commit wins.

#include <cstddef>
#include <cstdint>
#include <string>

namespace shardstep::detail {

class ReplacingFile {
 public:
  explicit ReplacingFile(const std::string& path);
  ReplacingFile(const ReplacingFile&) = delete;
  ReplacingFile& operator=(const ReplacingFile&) = delete;
  // Removes what was written, unless it was committed.
  ~ReplacingFile();

  // Records a failure for check() instead of throwing; after one, bytes are discarded.
  void write(const void* data, size_t size) noexcept;
  // Throws the failure of write(), if any.
  void check() const;
  // Reserves space for `size` bytes, where the file system supports that.
  void reserve(int64_t size);
  // Writes at an offset. Throws on failure.
  void write_at(int64_t offset, const void* data, size_t size);
  // Durably replaces the file with what was written. If the directory cannot be synced, this throws
  // although the file has been replaced.
  void commit();

 private:
  [[noreturn]] void fail(const char* what, int error) const;

  std::string path_;
  std::string temporary_;
  int descriptor_ = -1;
  int write_error_ = 0;
};

// Makes the names in a directory durable. Throws on failure.
void sync_directory(const std::string& directory);

}  // namespace shardstep::detail
