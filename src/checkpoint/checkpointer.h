#pragma once

// Saves and loads what a ShardEngine's ranks hold, as a checkpoint (checkpoint.h): each rank writes
// its own shard, and rank 0 the index when all shards exist. C++ and Python both use it.
// Collective: save, wait, load and share. An error on one rank is an error on all; a save that
// fails leaves the previous checkpoint in place. Thread safety: one thread at a time, but
// progress() from any. Destruction does not communicate: it calls finish(), and warns of a failure.

#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

#include "shard/shard_engine.h"
#include "shardstep/checkpoint.h"
#include "shardstep/export.h"
#include "shardstep/state_dict.h"

namespace shardstep {

namespace detail {
class SaveJob;
}

enum class SaveMode {
  kBlocking,
  kBackground,  // save() returns when the shard is copied
};

struct SaveOptions {
  SaveMode mode = SaveMode::kBlocking;
  // Called from time to time by the thread that writes.
  std::function<void(CheckpointProgress)> progress;
  // How long rank 0 waits for another rank's shard to appear in the directory. Unset: 30 minutes in
  // the background; 3 once all ranks have reported that theirs are written.
  std::optional<std::chrono::milliseconds> timeout;
  // How many checkpoints of a series stay, the new one included; unset: all.
  std::optional<int64_t> keep_last;
};

// A tensor of the module. Ranks share the writing of parameters, which are the same on all of them;
// buffers are saved from rank 0.
struct ModuleTensor {
  std::string name;
  at::Tensor tensor;
  bool is_buffer = false;
};

struct CheckpointContent {
  std::map<int64_t, NamedValues> state;  // of this rank's local parameters, by parameter index
  std::vector<StateDict::ParamGroup> param_groups;
  std::vector<std::string> names;  // by parameter index, or empty
  std::vector<ModuleTensor> module;
  // Extra state of the module, by name; saved from rank 0.
  std::map<std::string, c10::IValue> module_values;
  std::map<std::string, at::Tensor> rng;  // by device
  c10::IValue extra;                      // a dict or none; saved from rank 0
};

// What a checkpoint is loaded into.
struct CheckpointTarget {
  std::vector<StateDict::ParamGroup> param_groups;
  std::vector<std::string> names;          // by parameter index, or empty
  std::vector<NamedValues> defaults;       // by group, for options that the checkpoint lacks
  std::vector<bool> known_elementwise;     // by group: state has the parameter's shape, or no axes
  std::vector<ModuleTensor> module;        // empty if not requested
  std::vector<std::string> module_values;  // names of extra state
};

struct LoadedCheckpoint {
  std::map<int64_t, NamedValues> state;  // of this rank's local parameters, on their devices
  bool has_masters = false;              // in the state of any parameter; the same on every rank
  std::vector<StateDict::ParamGroup> param_groups;   // in the target's order
  std::vector<at::Tensor> module;                    // in the target's order, on the CPU
  std::map<std::string, c10::IValue> module_values;  // by name, as far as they were saved
  std::map<std::string, at::Tensor> rng;             // by device; empty if there was no such rank
  c10::IValue extra;
};

class SHARDSTEP_API Checkpointer {
 public:
  // REQUIRES: the engine lives longer.
  explicit Checkpointer(const ShardEngine& engine);
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  // Waits for the last save first. `pattern` is a directory, or stands for one
  // (checkpoint_series.h). `error` is what kept the caller from making the content. Collective.
  void save(const std::string& pattern, CheckpointContent content, const SaveOptions& options,
            std::exception_ptr error = nullptr);
  // Returns when the last save is complete on all ranks, or throws its error. Collective.
  void wait();
  CheckpointProgress progress() const;
  // Finishes a background save without communication: rank 0 waits at most ten seconds for the
  // other ranks' shards. Returns the error, if none of the calls above has thrown it. To be sure of
  // a checkpoint, call wait().
  std::optional<std::string> finish();

  // Reads what this rank needs, and verifies it. `prepare` gets it before the ranks agree that all
  // is well; an exception from it is an error on all ranks. Collective.
  LoadedCheckpoint load(const std::string& directory, const CheckpointTarget& target,
                        const std::function<void(const LoadedCheckpoint&)>& prepare = nullptr,
                        std::exception_ptr error = nullptr);
  // Throws on every rank if one of them has an error. Collective.
  void share(const std::exception_ptr& error) const;
  // How many bytes of the shards the last load() read on this rank.
  int64_t bytes_read() const { return bytes_read_; }

 private:
  bool has_no_index() const;

  const ShardEngine& engine_;
  pid_t process_;                         // that made this
  mutable std::mutex mutex_;              // guards the pointer
  std::shared_ptr<detail::SaveJob> job_;  // the last save
  bool waited_ = true;                    // for it
  int64_t bytes_read_ = 0;
};

}  // namespace shardstep
