#pragma once

// A file that takes the place of another in one move, or not at all: bytes go to a temporary file
// beside it. Not thread-safe; several may write to one path, the last to commit stays.

#include <cstddef>
#include <cstdint>
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
  // Takes the room for `size` bytes, where the file system can say whether there is any.
  void reserve(int64_t size);
  // Writes to a place of its own. Throws what goes wrong.
  void write_at(int64_t offset, const void* data, size_t size);
  // Makes what was written the file, durably. If the directory cannot be synced, this throws
  // although the file is in its place.
  void commit();

 private:
  [[noreturn]] void fail(const char* what, int error) const;

  std::string path_;
  std::string temporary_;
  int descriptor_ = -1;
  int write_error_ = 0;
};

// Makes the names in a directory durable. Throws what goes wrong.
void sync_directory(const std::string& directory);

}  // namespace shardstep::detail
