#include "checkpoint/save_job.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <unistd.h>

#include <filesystem>

#include "checkpoint/checkpoint_files.h"
#include "checkpoint/checkpoint_series.h"
#include "failure_points.h"

namespace shardstep::detail {
namespace {

constexpr auto kPollShards = std::chrono::milliseconds(20);
constexpr auto kTellProgress = std::chrono::milliseconds(100);
// How long rank 0 waits for other ranks' shards: while they are written; once they have reported
// that they are written, which a network file system may show late (NFS caches a directory for up
// to 60 seconds); and in finish().
constexpr auto kWrite = std::chrono::minutes(30);
constexpr auto kShow = std::chrono::minutes(3);
constexpr std::chrono::milliseconds kLeave = std::chrono::seconds(10);

}  // namespace

std::exception_ptr with_rank(const std::exception_ptr& error, const std::string& who) {
  auto text = [&](const c10::Error& caught) {
    const std::string found = caught.what_without_backtrace();
    return (found.starts_with("shardstep: ") ? "" : "shardstep: ") + found +
           (found.ends_with(who) ? "" : who);
  };
  const c10::SourceLocation here{__func__, __FILE__, __LINE__};
  try {
    std::rethrow_exception(error);
  } catch (const c10::ValueError& caught) {
    return std::make_exception_ptr(c10::ValueError(here, text(caught)));
  } catch (const c10::TypeError& caught) {
    return std::make_exception_ptr(c10::TypeError(here, text(caught)));
  } catch (const c10::Error& caught) {
    return std::make_exception_ptr(c10::Error(here, text(caught)));
  } catch (...) {
    return error;
  }
}

SaveJob::SaveJob(SaveTask task) : task_(std::move(task)) {
  for (const auto& part : task_.shard.parts) total_ += static_cast<int64_t>(part.tensor.nbytes());
}

SaveJob::~SaveJob() { finish(); }

void SaveJob::start() {
  try {
    copy_parts();
    in_background_ = true;
    thread_ = std::thread([this] {
      write_shard();
      if (task_.rank == 0) write_index();
    });
  } catch (...) {
    done(shard_done_, shard_error_, with_rank(std::current_exception(), who()));
  }
}

void SaveJob::copy_parts() {
  RECORD_FUNCTION("shardstep::checkpoint_copy", std::vector<c10::IValue>());
  at::NoGradGuard no_grad;
  for (auto& part : task_.shard.parts) {
    part.tensor = at::empty_strided(part.tensor.sizes(), part.tensor.strides(),
                                    part.tensor.options().device(at::kCPU))
                      .copy_(part.tensor);
  }
}

void SaveJob::write_shard() {
  RECORD_FUNCTION("shardstep::checkpoint_write", std::vector<c10::IValue>());
  std::exception_ptr error;
  try {
    ShardWriter writer(task_.directory, std::move(task_.shard), task_.head, task_.rank);
    for (size_t i = 0; i < writer.content().parts.size(); ++i) {
      writer.write(i, writer.content().parts[i].tensor, [&](int64_t bytes) { count(bytes); });
    }
    check_cancelled();
    SHARDSTEP_FAILURE_POINT("shard: written");
    writer.commit();
    SHARDSTEP_FAILURE_POINT("shard: committed");
  } catch (...) {
    error = with_rank(std::current_exception(), who());
  }
  done(shard_done_, shard_error_, error);
}

// REQUIRES: rank 0, after write_shard.
void SaveJob::write_index() {
  RECORD_FUNCTION("shardstep::checkpoint_index", std::vector<c10::IValue>());
  std::exception_ptr error;
  try {
    if (shard_error_) std::rethrow_exception(shard_error_);
    wait_for_shards();
    SHARDSTEP_FAILURE_POINT("index: begins");
    commit_index(task_.directory, task_.head);
    SHARDSTEP_FAILURE_POINT("index: committed");
    if (task_.series) {
      update_series(*task_.series, task_.directory, task_.options.keep_last);
    }
  } catch (...) {
    error = with_rank(std::current_exception(), who());
  }
  task_.lock = nullptr;
  done(index_done_, index_error_, error);
}

std::exception_ptr SaveJob::shard_error() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return shard_done_; });
  return shard_error_;
}

std::exception_ptr SaveJob::index_error() {
  if (task_.rank != 0) return nullptr;
  if (!in_background_ && !index_done_) write_index();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return index_done_; });
  return index_error_;
}

void SaveJob::expect_shards() { hurry(task_.options.timeout.value_or(kShow)); }

void SaveJob::cancel() {
  {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  task_.lock = nullptr;
}

void SaveJob::finish() {
  hurry(std::min(kLeave, task_.options.timeout.value_or(kLeave)));
  if (thread_.joinable()) thread_.join();
  task_.lock = nullptr;
}

bool SaveJob::index_is_in_place() const { return current_id(task_.directory) == task_.head.id; }

void SaveJob::remove_shard() { detail::remove_shard(task_.directory, task_.head.id, task_.rank); }

std::string SaveJob::who() const {
  return c10::str(" (rank ", task_.rank, " of ", task_.head.world_size, ")");
}

void SaveJob::done(bool& flag, std::exception_ptr& result, const std::exception_ptr& error) {
  const std::lock_guard lock(mutex_);
  flag = true;
  result = error;
  changed_.notify_all();
}

void SaveJob::hurry(std::chrono::milliseconds limit) {
  const std::lock_guard lock(mutex_);
  deadline_ = std::min(deadline_, Clock::now() + limit);
  changed_.notify_all();
}

void SaveJob::check_cancelled() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!cancelled_, "shardstep: the save to ", task_.directory, " was cancelled");
}

void SaveJob::count(int64_t bytes) {
  written_ += bytes;
  check_cancelled();
  if (!task_.options.progress) return;
  const auto now = Clock::now();
  if (now - told_ < kTellProgress && written_ < total_) return;
  told_ = now;
  task_.options.progress(progress());
}

// The other ranks' shards appear under their final names once they are whole.
void SaveJob::wait_for_shards() {
  std::unique_lock lock(mutex_);
  deadline_ = std::min(deadline_, Clock::now() + task_.options.timeout.value_or(kWrite));
  for (int rank = 0; rank < task_.head.world_size;) {
    const auto path = std::filesystem::path(task_.directory) / shard_name(task_.head.id, rank);
    if (::access(path.c_str(), F_OK) == 0) {
      ++rank;
      continue;
    }
    TORCH_CHECK(!cancelled_, "shardstep: the save to ", task_.directory, " was cancelled");
    TORCH_CHECK(Clock::now() < deadline_, "shardstep: waited too long for the shard ",
                path.string(), " of rank ", rank,
                "; all ranks must see the same directory, and call wait_checkpoint() before they "
                "exit");
    changed_.wait_for(lock, kPollShards);
  }
}

}  // namespace shardstep::detail
