#pragma once

// One writer at a time per directory: a file in it, locked by flock(2). The lock belongs to an open
// file, so it also excludes other writers of the same process, and it ends with the process that
// holds it, however that ends. The file says who holds it.
//
// On NFS, flock takes effect on all clients (Linux 2.6.12 and later), unless the mount has `nolock`
// or `local_lock`; there, and where a file system has no locks, only writers of one host, or none,
// are kept apart.

#include <string>

#include "shardstep/export.h"

namespace shardstep::detail {

constexpr const char* kLockName = "writer.lock";

class SHARDSTEP_API DirectoryLock {
 public:
  // Throws if someone else holds it, and says who.
  explicit DirectoryLock(const std::string& directory);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  std::string path_;
  int descriptor_ = -1;
};

// Tries to lock an open file for reading together with others, or alone; does not wait. True if the
// file system has no locks: there is nobody to hear of.
bool try_lock_shared(int descriptor);
bool try_lock_alone(int descriptor);
// Also for children that were forked meanwhile and have the same open file: closing it here would
// leave them with the lock.
void unlock(int descriptor);

// Whether the path still names the file that is open.
bool is_at(int descriptor, const std::string& path);

}  // namespace shardstep::detail
