#pragma once

// One save on one rank: its shard, and on rank 0 the index when the shards of all ranks are there.
// Runs in the caller's thread or in one of its own. Does not communicate: files tell rank 0 what
// the others have done. Thread safety: progress() from any thread, the rest from one.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "checkpoint/checkpoint_index.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/directory_lock.h"

namespace shardstep::detail {

// The same error, with whose it is and who it happened to.
std::exception_ptr with_rank(const std::exception_ptr& error, const std::string& who);

struct SaveTask {
  std::string directory;
  CheckpointIndex head;
  ShardContent shard;
  int rank = 0;
  SaveOptions options;
  std::unique_ptr<DirectoryLock> lock;  // rank 0's, held until there is an index or will be none
};

class SaveJob {
 public:
  explicit SaveJob(SaveTask task);
  // finish().
  ~SaveJob();
  SaveJob(const SaveJob&) = delete;
  SaveJob& operator=(const SaveJob&) = delete;

  // Copies the shard and starts writing. Does not throw: what goes wrong is the shard's error.
  void start();
  // Writes the shard here and now.
  void write_shard();

  // What went wrong with the shard, when it is written.
  std::exception_ptr shard_error();
  // What went wrong with the index, when it is written; nothing on ranks that do not write it.
  std::exception_ptr index_error();

  // All ranks say that their shards are written: what does not show soon, never will.
  void expect_shards();
  // Ends the writing as soon as possible. Whether there is an index then, the directory says.
  void cancel();
  // Lets the writing end. Other ranks' shards are waited for some seconds more.
  void finish();
  // REQUIRES: no rank will write the index of this save.
  void give_up();

  CheckpointProgress progress() const { return {written_.load(), total_}; }
  const std::string& directory() const { return task_.directory; }

 private:
  using Clock = std::chrono::steady_clock;

  void write_index();
  void copy_parts();
  std::string who() const;
  void done(bool& flag, std::exception_ptr& result, const std::exception_ptr& error);
  void hurry(std::chrono::milliseconds limit);
  void check_cancelled();
  void count(int64_t bytes);
  void wait_for_shards();

  SaveTask task_;
  int64_t total_ = 0;
  std::atomic<int64_t> written_{0};
  Clock::time_point told_{};

  std::mutex mutex_;
  std::condition_variable changed_;
  bool shard_done_ = false, index_done_ = false, cancelled_ = false;
  std::exception_ptr shard_error_, index_error_;
  Clock::time_point deadline_ = Clock::time_point::max();
  bool in_background_ = false;
  std::thread thread_;
};

}  // namespace shardstep::detail
