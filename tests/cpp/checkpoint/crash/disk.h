#pragma once

// A directory as a disk may hold it after the machine has failed, replayed from logged calls.

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/crash/file_calls.h"

namespace shardstep::crash {

// What a reader finds: contents by name.
using DiskState = std::map<std::string, std::string>;

class Disk {
 public:
  void replay(const LoggedCall& call);

  // What processes see.
  DiskState now() const;

  // Every state that a failure at this moment may leave: changes of names since the directory was
  // last synced have each happened or not; what was written to a file since it was synced is there,
  // lost, or there up to its middle.
  std::set<DiskState> after_failure() const;

 private:
  struct File {
    std::string now, synced;
    bool is_synced = true;
  };
  using FilePtr = std::shared_ptr<File>;
  using Names = std::map<std::string, FilePtr>;
  // `removed` loses its name, and `added` becomes that of `file`.
  struct Change {
    std::string removed, added;
    FilePtr file;
    void apply(Names& names) const;
  };

  void change(Change change);
  static std::vector<std::string> contents_after_failure(const File& file);
  static void add_states(const Names& names, Names::const_iterator from, DiskState& so_far,
                         std::set<DiskState>& states);

  Names now_, synced_;
  std::vector<Change> unsynced_;
  std::map<uint64_t, FilePtr> files_;  // by inode; numbers are used again
};

}  // namespace shardstep::crash
