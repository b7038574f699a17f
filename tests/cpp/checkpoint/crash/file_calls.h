#pragma once

// The calls by which the library reaches files, intercepted: a process can be killed at one of
// them, calls can fail, and calls of several processes can be logged in the order in which they
// were made. Other calls that change files end a process that logs.

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace shardstep::crash {

// Calls that this process may still make; it dies at the one after.
extern std::atomic<int> calls_left;

// The state of the calls of this process.
struct Calls {
  std::atomic<bool> interrupted{false};  // every other call, by a signal
  std::atomic<bool> next_is_interrupted{true};
  std::atomic<bool> no_directory_sync{false};  // once the index has its name
  std::atomic<bool> index_has_its_name{false};
  std::atomic<int> directory_sync_ms{0};  // how long each takes
  std::atomic<int> opened_shards{0};
  std::atomic<int64_t> bytes_read{0};
  std::set<ino_t> synced_directories;
};
extern Calls calls;

// A call that changed a file of the directory, or its names.
struct LoggedCall {
  enum Kind : int32_t { kCreate, kWrite, kSync, kSyncDirectory, kRename, kLink, kUnlink, kMark };
  Kind kind = kMark;
  uint64_t inode = 0;
  int64_t offset = 0;
  std::string name;  // below the directory
  std::string to;    // of a rename or link
  std::string data;  // of a write
};

// Memory that is shared with forked processes, for the calls on files of one directory.
class CallLog {
 public:
  explicit CallLog(std::string directory);
  ~CallLog();
  CallLog(const CallLog&) = delete;
  CallLog& operator=(const CallLog&) = delete;

  // From here on, this process logs its calls here. REQUIRES: the directory exists.
  void start();
  // A note between the calls.
  void mark(const std::string& name);
  // REQUIRES: nobody writes.
  std::vector<LoggedCall> read() const;

  // Used by the calls. While it is held, no other process makes one.
  class Turn {
   public:
    explicit Turn(CallLog* log);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    void add(const LoggedCall& call);

   private:
    CallLog* log_;
  };
  // Below the directory; empty if the path is not there.
  std::string name_of(const char* path) const;
  bool is_directory(uint64_t inode) const { return inode == directory_inode_; }

 private:
  struct Memory;
  std::string directory_;
  uint64_t directory_inode_ = 0;
  Memory* memory_;
};

}  // namespace shardstep::crash
