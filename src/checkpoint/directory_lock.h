#pragma once

// One writer at a time per directory: a file in it, locked with flock(2). The lock belongs to an
// open file, so it also excludes other writers in the same process, and it ends with the process
// that holds it, however that ends. The file says who holds it. proofs/checkpoint_commit.pml models
// taking and releasing it.
//
// On NFS, flock works across all clients (Linux 2.6.12 and later), unless the mount has `nolock` or
// `local_lock`; then it excludes only writers on the same host. On a file system without locks it
// excludes none.

#include <string>

#include "shardstep/export.h"

namespace shardstep::detail {

constexpr const char* kLockName = "writer.lock";

class SHARDSTEP_API DirectoryLock {
 public:
  // If another writer holds it, throws an error that says who.
  explicit DirectoryLock(const std::string& directory);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  std::string path_;
  int descriptor_ = -1;
};

// Tries to get a shared or an exclusive lock on an open file, without waiting. True if the file
// system has no locks.
bool try_lock_shared(int descriptor);
bool try_lock_alone(int descriptor);
// Also for children that were forked meanwhile and share the open file, who would keep the lock if
// the file were only closed here.
void unlock(int descriptor);

// Whether the path still names the open file.
bool is_at(int descriptor, const std::string& path);

}  // namespace shardstep::detail
