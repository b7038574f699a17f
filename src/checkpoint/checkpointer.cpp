#include "checkpoint/checkpointer.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <thread>

#include "checkpoint/checkpoint_files.h"
#include "comm/agreement.h"
#include "format/param_group_keys.h"
#include "launch/who.h"
#include "shard/state_layout.h"
#include "shard/state_matching.h"

namespace shardstep {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// Module parameters are cut at multiples of this many elements, so that small ones stay whole.
constexpr int64_t kCutElements = 1 << 16;
constexpr auto kPollShards = std::chrono::milliseconds(20);
constexpr auto kTellProgress = std::chrono::milliseconds(100);
// How long rank 0 waits for the other ranks' shards when it leaves; and when they were written, for
// a file system of several hosts to show them.
constexpr auto kLeave = std::chrono::seconds(10);
constexpr auto kShow = std::chrono::seconds(60);

// The same error, with whose it is and who it happened to.
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

at::Tensor dense(const at::Tensor& tensor) {
  return is_dense(tensor) ? tensor.detach() : tensor.detach().contiguous();
}

void check_strided(const at::Tensor& tensor, const std::string& name) {
  TORCH_CHECK_VALUE(tensor.defined() && tensor.layout() == at::kStrided, "shardstep: cannot save ",
                    name, ": expected a dense tensor");
}

// A parameter's state on this rank. What is not cut is the same on all owners: the first writes it.
void plan_state(const ShardEngine& engine, const LocalParam& local, const NamedValues& values,
                detail::ShardContent& shard) {
  const auto& param = engine.param(local.index);
  const bool first = engine.partition().slices(local.index).front().rank == engine.rank();
  if (first) shard.state[local.index];  // also if it is empty
  for (const auto& item : values) {
    const auto name = state_name(local.index, item.key());
    if (first) shard.state[local.index].push_back(item.key());
    if (!item.value().isTensor()) {
      if (first) shard.values.emplace(name, item.value());
      continue;
    }
    const auto& tensor = item.value().toTensor();
    check_strided(tensor, name);
    if (detail::is_cut(tensor, local.elements, engine.options().sharding)) {
      auto whole = detail::describe(param);
      whole.dtype = tensor.scalar_type();
      shard.parts.push_back({name, std::move(whole), local.elements, tensor.detach().contiguous()});
    } else if (first) {
      const auto ordered = detail::like_param(item.key(), tensor.sizes(), param)
                               ? in_order_of(param, tensor.detach())
                               : tensor.detach().contiguous();
      shard.parts.push_back({name, detail::describe(ordered), {0, tensor.numel()}, ordered});
    }
  }
}

// Where rank `rank`'s share of all module parameters' bytes begins in one of them.
int64_t cut_of(int64_t total, int64_t before, const at::Tensor& tensor, int rank, int world_size) {
  if (rank == world_size) return tensor.numel();
  const auto bytes = static_cast<int64_t>(static_cast<double>(total) * rank / world_size) - before;
  const int64_t element = bytes / tensor.element_size() / kCutElements * kCutElements;
  return bytes <= 0 ? 0 : std::min(element, tensor.numel());
}

void plan_module(const ShardEngine& engine, const std::vector<ModuleTensor>& module,
                 detail::ShardContent& shard) {
  int64_t total = 0, before = 0;
  for (const auto& [name, tensor, is_buffer] : module) {
    check_strided(tensor, "module." + name);
    if (!is_buffer) total += static_cast<int64_t>(tensor.nbytes());
  }
  for (const auto& [name, tensor, is_buffer] : module) {
    Range own{0, engine.rank() == 0 ? tensor.numel() : 0};
    if (!is_buffer && tensor.numel() > 0) {
      own = {cut_of(total, before, tensor, engine.rank(), engine.world_size()),
             cut_of(total, before, tensor, engine.rank() + 1, engine.world_size())};
      before += static_cast<int64_t>(tensor.nbytes());
    }
    if (own.empty() && !(tensor.numel() == 0 && engine.rank() == 0)) continue;
    const auto ordered = dense(tensor);
    shard.parts.push_back({"module." + name, detail::describe(ordered), own,
                           flat_view(ordered).narrow(0, own.begin, own.size())});
  }
}

detail::ShardContent plan(const ShardEngine& engine, const CheckpointContent& content) {
  at::NoGradGuard no_grad;
  detail::ShardContent shard;
  for (size_t group = 0; group < engine.group_count(); ++group) {
    for (const auto& local : engine.local_params(group)) {
      const auto found = content.state.find(local.index);
      if (found != content.state.end()) plan_state(engine, local, found->second, shard);
    }
  }
  plan_module(engine, content.module, shard);
  for (const auto& [device, state] : content.rng) {
    const auto own = state.detach().contiguous();
    shard.parts.push_back({c10::str("rng.", engine.rank(), ".", device),
                           detail::describe(own),
                           {0, own.numel()},
                           own});
  }
  return shard;
}

std::vector<CheckpointParameter> parameters_of(const ShardEngine& engine,
                                               const std::vector<std::string>& names) {
  std::vector<CheckpointParameter> parameters;
  for (int64_t i = 0; i < engine.param_count(); ++i) {
    const auto& param = engine.param(i);
    parameters.push_back({std::nullopt, param.sizes().vec(), param.scalar_type()});
    if (!names.empty() && !names[i].empty()) parameters.back().name = names[i];
  }
  return parameters;
}

// What must be the same on every rank for their shards to fit together.
std::vector<std::string> lines_of(const std::string& directory, const CheckpointContent& content,
                                  SaveMode mode) {
  std::vector<std::string> lines{c10::str("checkpoint in ", directory, ", in the background ",
                                          mode == SaveMode::kBackground, ", generators ",
                                          !content.rng.empty())};
  for (const auto& [name, tensor, is_buffer] : content.module) {
    lines.push_back(c10::str("module.", name, ": ", tensor.scalar_type(), " ", tensor.sizes(),
                             " strides ", tensor.strides()));
  }
  return lines;
}

std::string agreed_id(const ProcessGroupPtr& group) {
  auto id = detail::new_id();
  if (group->getSize() == 1) return id;
  auto bytes = at::empty({static_cast<int64_t>(id.size())}, at::kByte);
  std::copy(id.begin(), id.end(), bytes.mutable_data_ptr<uint8_t>());
  const auto first = detail::all_gather(group, bytes)[0];
  const auto* data = first.const_data_ptr<uint8_t>();
  return {data, data + first.numel()};
}

// -- loading --------------------------------------------------------------------------------------

// What an option is, as far as an optimizer cares.
const char* kind_of(const c10::IValue& value) {
  if (value.isBool()) return "a bool";
  if (value.isInt() || value.isDouble()) return "a number";
  if (value.isTensor()) return value.toTensor().numel() == 1 ? "a number" : "a tensor";
  if (value.isString()) return "a string";
  if (value.isTuple() || value.isList()) return "a sequence";
  return value_to_dtype(value) ? "a dtype" : "a dict";
}

void check_options(const NamedValues& expected, const NamedValues& saved, size_t group) {
  for (const auto& item : expected) {
    const auto* value = saved.find(item.key());
    if (value == nullptr) {
      TORCH_CHECK_VALUE(detail::is_foreign(item.key()), "shardstep: expected param group ", group,
                        " to have '", item.key(), "'");
      continue;
    }
    if (value->isNone() || item.value().isNone()) continue;
    const std::string ours = kind_of(item.value()), theirs = kind_of(*value);
    TORCH_CHECK_VALUE(ours == theirs, "shardstep: expected '", item.key(), "' of param group ",
                      group, " to be ", ours, ", got ", theirs);
    if (item.value().isTuple() && value->isTuple()) {
      const auto count = item.value().toTupleRef().elements().size();
      const auto got = value->toTupleRef().elements().size();
      TORCH_CHECK_VALUE(count == got, "shardstep: expected '", item.key(), "' of param group ",
                        group, " to have ", count, " values, got ", got);
    }
  }
}

// How an optimizer computes, not what: none leaves it as it is.
bool is_hint(const std::string& key) { return key == "foreach" || key == "fused"; }

NamedValues merged(const NamedValues& current, const NamedValues& saved) {
  NamedValues options;
  for (const auto& item : saved) {
    const auto* ours = current.find(item.key());
    const bool keep = is_hint(item.key()) && item.value().isNone() && ours != nullptr;
    options.insert(item.key(), keep ? *ours : item.value());
  }
  return options;
}

// For each of the engine's parameters, its index in the checkpoint. Throws unless the two fit.
std::vector<int64_t> match(const ShardEngine& engine, const CheckpointIndex& index,
                           const CheckpointTarget& target) {
  const auto ours_of = detail::match_params(detail::params_of(index.param_groups),
                                            detail::params_of(target.param_groups), "");
  std::vector<int64_t> saved(ours_of.size());
  for (const auto& [theirs, ours] : ours_of) saved[ours] = theirs;
  for (size_t i = 0; i < saved.size(); ++i) {
    const auto& theirs = index.parameters[saved[i]];
    const auto& param = engine.param(static_cast<int64_t>(i));
    const std::string name = target.names.empty() ? "" : target.names[i];
    TORCH_CHECK_VALUE(name.empty() || !theirs.name || *theirs.name == name,
                      "shardstep: expected parameter ", i, " to be ", name, ", got ",
                      theirs.name.value_or(""));
    TORCH_CHECK_VALUE(!theirs.shape || param.sizes() == *theirs.shape,
                      "shardstep: expected parameter ", i, name.empty() ? "" : " (" + name + ")",
                      " with shape ", param.sizes(), ", got ",
                      at::IntArrayRef(theirs.shape.value_or(std::vector<int64_t>{})));
  }
  for (size_t g = 0; g < index.param_groups.size(); ++g) {
    check_options(target.param_groups[g].options, index.param_groups[g].options, g);
  }
  return saved;
}

// This rank's part of a state tensor, laid out as the parameter.
at::Tensor read_like_param(Checkpoint& checkpoint, const std::string& name, const at::Tensor& param,
                           Range elements, Sharding sharding) {
  const auto& info = checkpoint.index().tensors.at(name);
  at::Tensor tensor;
  if (sharding == Sharding::kElement && info.order == memory_order(param)) {
    tensor = checkpoint.read(name, elements);
  } else {
    tensor = in_order_of(param.is_cpu() ? param : param.cpu(), checkpoint.read(name));
    if (sharding == Sharding::kElement) {
      tensor = flat_view(tensor).narrow(0, elements.begin, elements.size()).clone();
    }
  }
  return tensor.to(tensor.options()
                       .dtype(detail::state_dtype(tensor.scalar_type(), param))
                       .device(param.device()));
}

NamedValues read_state(Checkpoint& checkpoint, const ShardEngine& engine, const LocalParam& local,
                       int64_t saved, bool known_elementwise) {
  const auto& index = checkpoint.index();
  const auto& param = engine.param(local.index);
  const auto sharding = engine.options().sharding;
  NamedValues values;
  for (const auto& key : index.state.at(saved)) {
    const auto name = state_name(saved, key);
    const auto value = index.values.find(name);
    if (value != index.values.end()) {
      values.insert(key, value->second);
      continue;
    }
    const auto& info = index.tensors.at(name);
    if (detail::like_param(key, info.shape, param)) {
      values.insert(key, read_like_param(checkpoint, name, param, local.elements, sharding));
      continue;
    }
    detail::check_state_shape(key, info.shape, local.index, param, known_elementwise, "");
    values.insert(key, checkpoint.read(name));
  }
  return values;
}

void read_module(Checkpoint& checkpoint, const CheckpointTarget& target, LoadedCheckpoint& loaded) {
  constexpr std::string_view kPrefix = "module.";
  const auto& tensors = checkpoint.index().tensors;
  std::map<std::string, bool> asked;
  for (const auto& [name, tensor, is_buffer] : target.module) {
    const auto found = tensors.find(std::string(kPrefix) + name);
    TORCH_CHECK_VALUE(found != tensors.end(), "shardstep: expected the module's ", name,
                      ", got a checkpoint without it");
    TORCH_CHECK_VALUE(tensor.sizes() == found->second.shape, "shardstep: expected the module's ",
                      name, " with shape ", tensor.sizes(), ", got ",
                      at::IntArrayRef(found->second.shape));
    asked[found->first] = true;
  }
  for (const auto& [name, tensor] : tensors) {
    TORCH_CHECK_VALUE(!name.starts_with(kPrefix) || asked.count(name) > 0,
                      "shardstep: expected nothing that the module lacks, got ", name);
  }
  for (const auto& [name, tensor, is_buffer] : target.module) {
    loaded.module.push_back(checkpoint.read(std::string(kPrefix) + name));
  }
}

LoadedCheckpoint read_checkpoint_for(const ShardEngine& engine, Checkpoint& checkpoint,
                                     const CheckpointTarget& target) {
  at::NoGradGuard no_grad;
  const auto& index = checkpoint.index();
  const auto saved = match(engine, index, target);
  LoadedCheckpoint loaded;
  for (size_t group = 0; group < engine.group_count(); ++group) {
    for (const auto& local : engine.local_params(group)) {
      if (index.state.count(saved[local.index]) == 0) continue;
      loaded.state.emplace(local.index, read_state(checkpoint, engine, local, saved[local.index],
                                                   target.known_elementwise));
    }
  }
  if (!target.module.empty()) read_module(checkpoint, target, loaded);
  const auto own_rng = c10::str("rng.", engine.rank(), ".");
  for (const auto& [name, tensor] : index.tensors) {
    if (name.starts_with(own_rng)) {
      loaded.rng.emplace(name.substr(own_rng.size()), checkpoint.read(name));
    }
  }
  for (size_t g = 0; g < index.param_groups.size(); ++g) {
    loaded.param_groups.push_back(
        {merged(target.param_groups[g].options, index.param_groups[g].options),
         target.param_groups[g].params});
  }
  loaded.extra = index.extra;
  return loaded;
}

}  // namespace

// One save on one rank: its shard, and on rank 0 the index. Runs in the caller's thread or in one
// of its own.
class Checkpointer::Job {
 public:
  Job(std::string directory, CheckpointIndex head, detail::ShardContent shard, int rank,
      const SaveOptions& options)
      : directory_(std::move(directory)),
        head_(std::move(head)),
        shard_(std::move(shard)),
        rank_(rank),
        options_(options) {
    for (const auto& part : shard_.parts) total_ += static_cast<int64_t>(part.tensor.nbytes());
  }
  ~Job() { finish(); }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // Copies the shard and starts writing. Does not throw: what goes wrong is the shard's error.
  void start() {
    try {
      at::NoGradGuard no_grad;
      for (auto& part : shard_.parts) {
        part.tensor = at::empty_strided(part.tensor.sizes(), part.tensor.strides(),
                                        part.tensor.options().device(at::kCPU))
                          .copy_(part.tensor);
      }
      thread_ = std::thread([this] {
        write_shard();
        if (rank_ == 0) write_index();
      });
    } catch (...) {
      done(shard_done_, shard_error_, with_rank(std::current_exception(), who()));
    }
  }

  void write_shard() {
    std::exception_ptr error;
    try {
      detail::ShardWriter writer(directory_, std::move(shard_), head_, rank_);
      for (size_t i = 0; i < writer.content().parts.size(); ++i) {
        writer.write(i, writer.content().parts[i].tensor, [&](int64_t bytes) { count(bytes); });
      }
      check_cancelled();
      writer.commit();
    } catch (...) {
      error = with_rank(std::current_exception(), who());
    }
    done(shard_done_, shard_error_, error);
  }

  // REQUIRES: rank 0, after write_shard.
  void write_index() {
    std::exception_ptr error;
    try {
      if (shard_error_) std::rethrow_exception(shard_error_);
      wait_for_shards();
      detail::commit_index(directory_, head_);
    } catch (...) {
      error = with_rank(std::current_exception(), who());
    }
    done(index_done_, index_error_, error);
  }

  bool in_background() const { return thread_.joinable(); }
  // What went wrong with the shard, when it is written.
  std::exception_ptr shard_error() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return shard_done_; });
    return shard_error_;
  }
  // What went wrong with the index, when it is written; nothing on ranks that do not write it.
  std::exception_ptr index_error() {
    if (rank_ != 0) return nullptr;
    if (!in_background() && !index_done_) write_index();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return index_done_; });
    return index_error_;
  }

  void cancel() {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
    changed_.notify_all();
  }
  // From here on other ranks' shards are waited for only this long.
  void hurry(std::chrono::seconds limit) {
    const std::lock_guard lock(mutex_);
    deadline_ = std::min(deadline_, Clock::now() + limit);
    changed_.notify_all();
  }
  void finish() {
    hurry(kLeave);
    if (thread_.joinable()) thread_.join();
  }
  // REQUIRES: no rank will write the index of this save.
  void remove_shard() {
    cancel();
    if (thread_.joinable()) thread_.join();
    ::unlink((fs::path(directory_) / detail::shard_name(head_.id, rank_)).c_str());
  }

  CheckpointProgress progress() const { return {written_.load(), total_}; }
  const std::string& directory() const { return directory_; }

 private:
  std::string who() const { return detail::who(rank_, head_.world_size); }
  void done(bool& flag, std::exception_ptr& result, const std::exception_ptr& error) {
    const std::lock_guard lock(mutex_);
    flag = true;
    result = error;
    changed_.notify_all();
  }
  void check_cancelled() {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!cancelled_, "shardstep: the save to ", directory_, " was given up");
  }
  void count(int64_t bytes) {
    written_ += bytes;
    check_cancelled();
    if (!options_.progress) return;
    const auto now = Clock::now();
    if (now - told_ < kTellProgress && written_ < total_) return;
    told_ = now;
    options_.progress(progress());
  }
  // The other ranks' shards are there under their names once they are whole.
  void wait_for_shards() {
    std::unique_lock lock(mutex_);
    deadline_ = std::min(deadline_, Clock::now() + options_.timeout);
    for (int rank = 0; rank < head_.world_size;) {
      const auto path = fs::path(directory_) / detail::shard_name(head_.id, rank);
      if (::access(path.c_str(), F_OK) == 0) {
        ++rank;
        continue;
      }
      TORCH_CHECK(!cancelled_, "shardstep: the save to ", directory_, " was given up");
      TORCH_CHECK(Clock::now() < deadline_, "shardstep: waited too long for the shard ",
                  path.string(), " of rank ", rank, "; all ranks must see the same directory");
      changed_.wait_for(lock, kPollShards);
    }
  }

  const std::string directory_;
  const CheckpointIndex head_;
  detail::ShardContent shard_;
  const int rank_;
  const SaveOptions options_;
  int64_t total_ = 0;
  std::atomic<int64_t> written_{0};
  Clock::time_point told_{};

  std::mutex mutex_;
  std::condition_variable changed_;
  bool shard_done_ = false, index_done_ = false, cancelled_ = false;
  std::exception_ptr shard_error_, index_error_;
  Clock::time_point deadline_ = Clock::time_point::max();
  std::thread thread_;
};

Checkpointer::Checkpointer(const ShardEngine& engine) : engine_(engine) {}
Checkpointer::~Checkpointer() { finish(); }

void Checkpointer::save(const std::string& directory, CheckpointContent content,
                        const SaveOptions& options, std::exception_ptr error) {
  wait();
  const auto& group = engine_.process_group();
  detail::ShardContent shard;
  CheckpointIndex head;
  head.world_size = engine_.world_size();
  head.stage = engine_.stage();
  head.sharding = engine_.options().sharding;
  std::vector<std::string> lines;
  if (!error) {
    try {
      detail::prepare_directory(directory);
      shard = plan(engine_, content);
      head.param_groups = std::move(content.param_groups);
      head.parameters = parameters_of(engine_, content.names);
      head.extra = std::move(content.extra);
      // What JSON cannot hold is found here, and not after the shards are written.
      detail::index_to_text(head);
      lines = lines_of(directory, content, options.mode);
    } catch (...) {
      error = std::current_exception();
    }
  }
  detail::agree(group, lines, error ? with_rank(error, detail::who(group)) : nullptr);
  head.id = agreed_id(group);
  auto job =
      std::make_shared<Job>(directory, std::move(head), std::move(shard), engine_.rank(), options);
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
  const auto& group = engine_.process_group();
  // A failure that all ranks know of means that there will be no index. If the ranks cannot talk,
  // there may be one, and the shards must stay: the next save removes them if need be.
  auto error = job_->shard_error();
  std::optional<detail::Failure> failure;
  try {
    failure = detail::first_failure(group, error);
    if (!failure) {
      job_->hurry(kShow);
      error = job_->index_error();
      failure = detail::first_failure(group, error);
    }
  } catch (...) {
    job_->cancel();
    if (error) std::rethrow_exception(error);
    TORCH_CHECK(false, "shardstep: could not hear from every rank whether the checkpoint in ",
                job_->directory(), " is complete: ", detail::message_of(std::current_exception()),
                detail::who(group));
  }
  if (!failure) return;
  job_->remove_shard();
  detail::throw_failure(group, *failure, error);
}

void Checkpointer::finish() {
  if (job_) job_->finish();
}

CheckpointProgress Checkpointer::progress() const {
  const std::lock_guard lock(mutex_);
  return job_ ? job_->progress() : CheckpointProgress{};
}

LoadedCheckpoint Checkpointer::load(const std::string& directory, const CheckpointTarget& target,
                                    const std::function<void(const LoadedCheckpoint&)>& prepare,
                                    std::exception_ptr error) {
  wait();
  const auto& group = engine_.process_group();
  LoadedCheckpoint loaded;
  std::vector<std::string> lines;
  if (!error) {
    try {
      Checkpoint checkpoint(directory);
      loaded = read_checkpoint_for(engine_, checkpoint, target);
      if (prepare) prepare(loaded);
      bytes_read_ = checkpoint.bytes_read();
      lines.push_back("checkpoint " + checkpoint.index().id);
    } catch (...) {
      error = std::current_exception();
    }
  }
  detail::agree(group, lines, error ? with_rank(error, detail::who(group)) : nullptr);
  return loaded;
}

void Checkpointer::share(const std::exception_ptr& error) const {
  const auto& group = engine_.process_group();
  if (const auto failure = detail::first_failure(group, error)) {
    detail::throw_failure(group, *failure, error);
  }
}

}  // namespace shardstep
