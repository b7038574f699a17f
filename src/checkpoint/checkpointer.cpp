#include "checkpoint/checkpointer.h"

#include <ATen/record_function.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <thread>

#include "checkpoint/checkpoint_files.h"
#include "checkpoint/checkpoint_load.h"
#include "checkpoint/checkpoint_series.h"
#include "checkpoint/save_job.h"
#include "checkpoint/save_plan.h"
#include "comm/agreement.h"
#include "failure_points.h"
#include "launch/who.h"

namespace shardstep {
namespace {

// Ranks that opened different checkpoints, because one was replaced meanwhile, open them again.
constexpr int kMostRounds = 100;
constexpr auto kBetweenRounds = std::chrono::milliseconds(20);
constexpr size_t kIdBytes = 16;

// The id that each rank passes; shorter ones are padded. Collective.
std::vector<std::string> gather_ids(const ProcessGroupPtr& group, std::string id) {
  id.resize(kIdBytes, ' ');
  if (group->getSize() == 1) return {id};
  auto bytes = at::empty({static_cast<int64_t>(id.size())}, at::kByte);
  std::copy(id.begin(), id.end(), bytes.mutable_data_ptr<uint8_t>());
  std::vector<std::string> ids;
  for (const auto& tensor : detail::all_gather(group, bytes)) {
    const auto* data = tensor.const_data_ptr<uint8_t>();
    ids.emplace_back(data, data + tensor.numel());
  }
  return ids;
}

// Opens the checkpoint of the directory, the same one on every rank. Ranks where that fails get an
// error instead. Collective.
std::optional<Checkpoint> open_together(const ProcessGroupPtr& group, const std::string& directory,
                                        std::exception_ptr& error) {
  std::optional<Checkpoint> checkpoint;
  for (int round = 0; round < kMostRounds; ++round) {
    if (round > 0) std::this_thread::sleep_for(kBetweenRounds);
    try {
      checkpoint.reset();
      if (!error) checkpoint.emplace(directory);
    } catch (...) {
      error = std::current_exception();
    }
    const auto ids = gather_ids(group, checkpoint ? checkpoint->index().id : "");
    const bool failed = std::any_of(ids.begin(), ids.end(),
                                    [](const std::string& id) { return id.front() == ' '; });
    if (failed || std::equal(ids.begin() + 1, ids.end(), ids.begin())) break;
  }
  return checkpoint;
}

void check_keep_last(const std::string& pattern, const SaveOptions& options) {
  if (!options.keep_last) return;
  TORCH_CHECK_VALUE(*options.keep_last >= 1, "shardstep: expected keep_last of 1 or more, got ",
                    *options.keep_last);
  TORCH_CHECK_VALUE(detail::is_series(pattern),
                    "shardstep: expected a directory such as \"runs/{step}\" with keep_last, got ",
                    pattern);
}

}  // namespace

Checkpointer::Checkpointer(const ShardEngine& engine) : engine_(engine), process_(::getpid()) {}

Checkpointer::~Checkpointer() {
  try {
    if (const auto failure = finish()) TORCH_WARN(*failure);
  } catch (...) {
    // No caller is left to report it to.
  }
}

void Checkpointer::save(const std::string& pattern, CheckpointContent content,
                        const SaveOptions& options, std::exception_ptr error) {
  wait();
  const auto& group = engine_.control_group();
  detail::SaveTask task;
  std::string directory;
  std::vector<std::string> lines;
  if (!error) {
    try {
      check_keep_last(pattern, options);
      directory = detail::expand_directory(pattern, content.extra);
      auto plan = detail::plan_save(engine_, content);
      lines = detail::comparable_lines(directory, content, options.mode);
      detail::make_directory(directory);
      if (engine_.rank() == 0) {
        detail::check_replaceable(directory);
        task.lock = std::make_unique<detail::DirectoryLock>(directory);
        SHARDSTEP_FAILURE_POINT("save: locked");
      }
      task.head = std::move(plan.head);
      task.shard = std::move(plan.shard);
    } catch (...) {
      error = std::current_exception();
    }
  }
  detail::agree(group, lines, error ? detail::with_rank(error, detail::who(group)) : nullptr);
  SHARDSTEP_FAILURE_POINT("save: agreed");
  // The program may change its working directory while the thread writes.
  task.directory = std::filesystem::absolute(directory).string();
  if (detail::is_series(pattern)) task.series = std::filesystem::absolute(pattern).string();
  task.head.id = gather_ids(group, detail::new_id())[0];
  task.rank = engine_.rank();
  task.options = options;
  auto job = std::make_shared<detail::SaveJob>(std::move(task));
  {
    const std::lock_guard lock(mutex_);
    job_ = std::move(job);
  }
  waited_ = false;
  if (options.mode == SaveMode::kBackground) {
    job_->start();
  } else {
    job_->write_shard();
    wait();
  }
}

void Checkpointer::wait() {
  if (!job_ || waited_) return;
  waited_ = true;
  const auto& group = engine_.control_group();
  // If the ranks cannot communicate, there may be an index, and the shards must stay; the next save
  // removes them if needed.
  auto error = job_->shard_error();
  std::optional<detail::Failure> failure;
  try {
    failure = detail::first_failure(group, error);
    if (!failure) {
      SHARDSTEP_FAILURE_POINT("save: shards are known");
      job_->expect_shards();
      error = job_->index_error();
      failure = detail::first_failure(group, error);
    }
  } catch (...) {
    job_->cancel();
    if (error) std::rethrow_exception(error);
    TORCH_CHECK(false, "shardstep: could not learn from every rank whether the checkpoint in ",
                job_->directory(), " is complete: ", detail::message_of(std::current_exception()),
                detail::who(group));
  }
  if (!failure) return;
  job_->cancel();
  if (has_no_index()) job_->remove_shard();
  detail::throw_failure(group, *failure, error);
}

// Whether rank 0 has stopped without an index of this save, as it tells all ranks. Its thread may
// have put one in place after the failure of another rank, whose shard it found. REQUIRES: it is
// cancelled. Collective.
bool Checkpointer::has_no_index() const {
  try {
    return detail::all_gather_number(engine_.control_group(), job_->index_is_in_place()).at(0) == 0;
  } catch (const std::exception&) {
    return false;  // nobody knows
  }
}

std::optional<std::string> Checkpointer::finish() {
  if (!job_) return std::nullopt;
  if (::getpid() != process_) {
    // The thread that writes is not in this child of fork(): it stays the parent's affair.
    [[maybe_unused]] const auto* kept = new std::shared_ptr(std::move(job_));
    return std::nullopt;
  }
  job_->finish();
  if (waited_) return std::nullopt;
  waited_ = true;
  auto error = job_->shard_error();
  if (!error) error = job_->index_error();
  if (!error) return std::nullopt;
  return c10::str(
      "shardstep: the checkpoint in ", job_->directory(),
      " was not saved, and no later call reported the error: ", detail::message_of(error));
}

CheckpointProgress Checkpointer::progress() const {
  const std::lock_guard lock(mutex_);
  return job_ ? job_->progress() : CheckpointProgress{};
}

LoadedCheckpoint Checkpointer::load(const std::string& directory, const CheckpointTarget& target,
                                    const std::function<void(const LoadedCheckpoint&)>& prepare,
                                    std::exception_ptr error) {
  RECORD_FUNCTION("shardstep::checkpoint_load", std::vector<c10::IValue>());
  wait();
  const auto& group = engine_.control_group();
  LoadedCheckpoint loaded;
  std::vector<std::string> lines;
  auto checkpoint = open_together(group, directory, error);
  if (checkpoint) {
    try {
      loaded = detail::read_checkpoint_for(engine_, *checkpoint, target);
      if (prepare) prepare(loaded);
      bytes_read_ = checkpoint->bytes_read();
      lines.push_back("checkpoint " + checkpoint->index().id);
      for (const auto& [name, tensor, is_buffer] : target.module) {
        lines.push_back(c10::str("module.", name, ": ", tensor.scalar_type(), " ", tensor.sizes()));
      }
      lines.insert(lines.end(), target.module_values.begin(), target.module_values.end());
    } catch (...) {
      error = std::current_exception();
    }
  }
  detail::agree(group, lines, error ? detail::with_rank(error, detail::who(group)) : nullptr);
  return loaded;
}

void Checkpointer::share(const std::exception_ptr& error) const {
  const auto& group = engine_.control_group();
  if (const auto failure = detail::first_failure(group, error)) {
    detail::throw_failure(group, *failure, error);
  }
}

}  // namespace shardstep
