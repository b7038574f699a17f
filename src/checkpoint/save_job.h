#pragma once

// One save on one rank: its shard, and on rank 0 the index when the shards of all ranks exist. Runs
// in the caller's thread or in its own. Does not communicate: rank 0 sees in the directory what the
// others have done; proofs/checkpoint_commit.pml models that, down to commit_index() and readers.
// Thread safety: progress() from any thread, the rest from one.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "checkpoint/checkpoint_index.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/directory_lock.h"

namespace shardstep::detail {

// The same error, with "shardstep: " in front and `who` at the end.
std::exception_ptr with_rank(const std::exception_ptr& error, const std::string& who);

struct SaveTask {
  std::string directory;
  std::optional<std::string> series;  // the pattern that the directory comes from
  CheckpointIndex head;
  ShardContent shard;
  int rank = 0;
  SaveOptions options;
  std::unique_ptr<DirectoryLock> lock;  // rank 0's, held until the index exists or never will
};

class SaveJob {
 public:
  explicit SaveJob(SaveTask task);
  // finish().
  ~SaveJob();
  SaveJob(const SaveJob&) = delete;
  SaveJob& operator=(const SaveJob&) = delete;

  // Copies the shard and starts writing. Does not throw: failures become shard_error().
  void start();
  // Writes the shard in this thread.
  void write_shard();

  // Waits until the shard is written, and returns its error, if any.
  std::exception_ptr shard_error();
  // Waits until the index is written, and returns its error, if any; null on other ranks.
  std::exception_ptr index_error();

  // Call when all ranks have reported that their shards are written, and should appear soon.
  void expect_shards();
  // Ends the writing as soon as possible. The index may or may not exist then.
  void cancel();
  // Finishes the writing. Waits a few more seconds for other ranks' shards.
  void finish();
  // Whether the directory holds this save.
  bool index_is_in_place() const;
  // REQUIRES: there is no index of this save, and no rank will write one.
  void remove_shard();

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
