#include "checkpoint/directory_lock.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <filesystem>
#include <system_error>

namespace shardstep::detail {
namespace {

// How often a file that is unlinked between open and lock is opened again.
constexpr int kMostTries = 1000;

bool try_lock(int descriptor, int kind) {
  int result = 0;
  do {
    result = ::flock(descriptor, kind | LOCK_NB);
  } while (result != 0 && errno == EINTR);
  return result == 0 || errno != EWOULDBLOCK;
}

// "process 12 on node-3 since 2026-01-31 12:00:00 UTC".
std::string owner_text() {
  char host[256] = "";
  ::gethostname(host, sizeof(host) - 1);
  char time[32] = "";
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  std::strftime(time, sizeof(time), "%F %T UTC", ::gmtime_r(&now, &parts));
  return c10::str("process ", ::getpid(), " on ", host, " since ", time);
}

std::string read_owner(int descriptor) {
  char text[512];
  const auto size = ::pread(descriptor, text, sizeof(text), 0);
  // The file is still empty right after it was locked.
  return size > 0 ? std::string(text, static_cast<size_t>(size)) : "another process";
}

}  // namespace

bool try_lock_shared(int descriptor) { return try_lock(descriptor, LOCK_SH); }
bool try_lock_alone(int descriptor) { return try_lock(descriptor, LOCK_EX); }

void unlock(int descriptor) { ::flock(descriptor, LOCK_UN); }

bool is_at(int descriptor, const std::string& path) {
  struct stat opened{}, named{};
  return ::fstat(descriptor, &opened) == 0 && ::stat(path.c_str(), &named) == 0 &&
         opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

DirectoryLock::DirectoryLock(const std::string& directory)
    : path_((std::filesystem::path(directory) / kLockName).string()) {
  for (int tries = 0; tries < kMostTries; ++tries) {
    descriptor_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (descriptor_ < 0 && errno == EINTR) continue;
    TORCH_CHECK(descriptor_ >= 0, "shardstep: cannot write ", path_, ": ",
                std::generic_category().message(errno));
    if (!try_lock_alone(descriptor_)) {
      const auto owner = read_owner(descriptor_);
      ::close(descriptor_);
      TORCH_CHECK(false, "shardstep: expected no other writer of ", directory, ", got ", owner,
                  "; wait until its save is complete, or save to another directory");
    }
    if (is_at(descriptor_, path_)) {
      const auto owner = owner_text();
      // Only for error messages, so a full disk is not an error here.
      if (::ftruncate(descriptor_, 0) == 0) {
        [[maybe_unused]] const auto count = ::pwrite(descriptor_, owner.data(), owner.size(), 0);
      }
      return;
    }
    ::close(descriptor_);
  }
  TORCH_CHECK(false, "shardstep: cannot lock ", path_,
              ": it is replaced repeatedly; try again later");
}

DirectoryLock::~DirectoryLock() {
  ::unlink(path_.c_str());
  unlock(descriptor_);
  ::close(descriptor_);
}

}  // namespace shardstep::detail
