#include "format/replacing_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

namespace shardstep::detail {

namespace {

namespace fs = std::filesystem;

// The most that one call writes: Linux accepts at most 2 GB.
constexpr size_t kMostBytes = size_t{1} << 30;

// Repeats a call that a signal interrupts. Returns what the call returned.
template <class Call>
auto uninterrupted(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// A link stays a link; the file that it points to is replaced.
std::string real_path(const std::string& path) {
  std::error_code error;
  if (!fs::is_symlink(path, error)) return path;
  auto real = fs::weakly_canonical(path, error);
  return error ? path : real.string();
}

}  // namespace

ReplacingFile::ReplacingFile(const std::string& path) : path_(real_path(path)) {
  std::error_code error;
  auto status = fs::status(path_, error);
  TORCH_CHECK_VALUE(!fs::exists(status) || fs::is_regular_file(status), "shardstep: cannot write ",
                    path_, ": it is not a regular file");
  // open() and not mkstemp(), so that the file gets the permissions of any new file.
  for (int i = 0; descriptor_ < 0; ++i) {
    temporary_ = path_ + ".tmp-" + std::to_string(::getpid()) + "-" + std::to_string(i);
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ < 0 && errno != EEXIST && errno != EINTR) fail("cannot write", errno);
  }
}

ReplacingFile::~ReplacingFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void ReplacingFile::write(const void* data, size_t size) noexcept {
  const auto* next = static_cast<const char*>(data);
  while (size > 0 && write_error_ == 0) {
    auto written = ::write(descriptor_, next, std::min(size, kMostBytes));
    if (written >= 0) {
      next += written;
      size -= written;
    } else if (errno != EINTR) {
      write_error_ = errno;
    }
  }
}

void ReplacingFile::check() const {
  if (write_error_ != 0) fail("cannot write", write_error_);
}

void ReplacingFile::reserve(int64_t size) {
  if (size == 0) return;
  const int result = uninterrupted([&] { return ::fallocate(descriptor_, 0, 0, size); });
  if (result != 0 && errno != EOPNOTSUPP && errno != ENOSYS) fail("cannot write", errno);
}

void ReplacingFile::write_at(int64_t offset, const void* data, size_t size) {
  const auto* next = static_cast<const char*>(data);
  while (size > 0) {
    auto written = ::pwrite(descriptor_, next, std::min(size, kMostBytes), offset);
    if (written >= 0) {
      next += written;
      offset += written;
      size -= written;
    } else if (errno != EINTR) {
      fail("cannot write", errno);
    }
  }
}

void ReplacingFile::commit() {
  check();
  if (uninterrupted([&] { return ::fsync(descriptor_); }) != 0) fail("cannot write", errno);
  int descriptor = std::exchange(descriptor_, -1);
  if (::close(descriptor) != 0 && errno != EINTR) fail("cannot write", errno);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot replace", errno);
  temporary_.clear();
  sync_directory(fs::path(path_).parent_path().string());
}

void ReplacingFile::fail(const char* what, int error) const {
  TORCH_CHECK(false, "shardstep: ", what, " ", path_, ": ", std::generic_category().message(error));
}

void sync_directory(const std::string& directory) {
  const std::string path = directory.empty() ? "." : directory;
  const int opened =
      uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  int error = opened < 0 ? errno : 0;
  if (opened >= 0 && uninterrupted([&] { return ::fsync(opened); }) != 0) error = errno;
  if (opened >= 0) ::close(opened);
  // EINVAL: this file system does not support syncing a directory.
  TORCH_CHECK(error == 0 || error == EINVAL, "shardstep: cannot sync the directory ", path, ": ",
              std::generic_category().message(error),
              "; what was written there may be lost if the machine fails");
}

}  // namespace shardstep::detail
