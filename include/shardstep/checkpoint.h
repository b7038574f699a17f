#pragma once

// A checkpoint is a directory: `index.json`, and one `shard-<id>-<rank>.safetensors` per rank that
// wrote it. The index is renamed into place last, so a directory holds a whole checkpoint or none.
// Its tensors are
//   state.<parameter index>.<key>   the optimizer's state
//   module.<name>                   the module's parameters, buffers and extra state
//   rng.<rank>.<device>             the random generators of a rank
// Each is cut into parts, ranges of its elements in memory order, which may be anywhere in the
// shards.
// Thread safety: one thread at a time. Nothing here is collective.

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shardstep/export.h"
#include "shardstep/range.h"
#include "shardstep/sharding.h"
#include "shardstep/state_dict.h"

namespace shardstep {

// How much of this rank's shard is written.
struct CheckpointProgress {
  int64_t written = 0;  // bytes
  int64_t total = 0;
};

struct CheckpointPart {
  size_t file = 0;                  // in CheckpointIndex::files
  Range elements;                   // of the tensor, in memory order
  int64_t offset = 0;               // of the first byte in the file
  std::vector<uint32_t> checksums;  // CRC-32 of each block of CheckpointIndex::block bytes
};

struct CheckpointTensor {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;
  // Axes from the slowest to the fastest in memory; empty if they are in order.
  std::vector<int64_t> order;
  std::vector<CheckpointPart> parts;  // in order of their elements, without gaps

  SHARDSTEP_API int64_t numel() const;
  SHARDSTEP_API int64_t nbytes() const;
  SHARDSTEP_API std::vector<int64_t> strides() const;
};

// The memory order of a dense tensor; see CheckpointTensor::order.
SHARDSTEP_API std::vector<int64_t> memory_order(const at::Tensor& tensor);

struct CheckpointFile {
  std::string name;
  int rank = 0;
  int64_t bytes = 0;
};

// A parameter of the optimizer. Shape and dtype are unset in a checkpoint made from a state dict.
struct CheckpointParameter {
  std::optional<std::string> name;
  std::optional<std::vector<int64_t>> shape;
  std::optional<at::ScalarType> dtype;
};

// The contents of index.json.
struct CheckpointIndex {
  std::string id;  // unique to each save
  int world_size = 1;
  int stage = 1;
  Sharding sharding = Sharding::kParameter;
  int64_t block = 1 << 20;  // bytes that one checksum covers
  std::vector<CheckpointFile> files;
  std::vector<StateDict::ParamGroup> param_groups;
  std::vector<CheckpointParameter> parameters;
  // The keys of each parameter's state, in order: each is a tensor state.<index>.<key>, or one of
  // `values` under the same name.
  std::map<int64_t, std::vector<std::string>> state;
  std::map<std::string, c10::IValue> values;
  std::map<std::string, CheckpointTensor> tensors;
  // Extra state of the module that is not a tensor, by name.
  std::map<std::string, c10::IValue> module_values;
  c10::IValue extra;  // the user's dict, or none
};

// "state.<index>.<key>".
SHARDSTEP_API std::string state_name(int64_t index, const std::string& key);

// What the names of the module's tensors start with.
inline constexpr const char* kModulePrefix = "module.";

// Reads a checkpoint: the index immediately, and from the shards only what is asked for. That works
// even after another checkpoint was saved to the directory, because a save does not remove files
// that a reader has open. Anything wrong with a file is a ValueError that names it.
class SHARDSTEP_API Checkpoint {
 public:
  // `directory` may be a link, such as `latest`.
  explicit Checkpoint(const std::string& directory);
  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;

  const std::string& directory() const;
  const CheckpointIndex& index() const;

  // The names of the module's tensors, without kModulePrefix; none if no module was saved.
  std::vector<std::string> module_names() const;
  // A whole tensor, in the memory order that it was saved in.
  at::Tensor read(const std::string& name);
  // The same, into the caller's memory. REQUIRES: room for the whole tensor.
  void read_to(const std::string& name, void* memory);
  // Some elements, in memory order and 1-D. Reads and verifies only the blocks that hold them.
  at::Tensor read(const std::string& name, Range elements);
  // Throws ValueError unless every block of the tensor matches its checksum.
  void verify(const std::string& name);
  // Throws ValueError unless each shard is the safetensors file that the index says it is.
  void verify_headers();
  // Verifies the headers and all tensors.
  void verify();
  // The optimizer's whole state, as its state_dict() returns it.
  StateDict state_dict();
  // The same, with `read` called for each tensor.
  StateDict state_dict(const std::function<at::Tensor(const std::string& name)>& read) const;

  // How many bytes of the shards have been read so far.
  int64_t bytes_read() const;

 private:
  struct Files;
  const CheckpointTensor& find(const std::string& name) const;
  void read_into(const std::string& name, Range elements, char* to);

  std::unique_ptr<Files> files_;
};

// The optimizer's whole state from a checkpoint. Reads nothing else.
SHARDSTEP_API StateDict read_checkpoint(const std::string& directory);

// Writes a checkpoint of one shard in a single process, one tensor at a time.
class SHARDSTEP_API CheckpointWriter {
 public:
  // `index` says what will be written, with the dtype, shape and order of each tensor. The writer
  // fills in parts, files, the id and the world size. A checkpoint that exists in `directory` does
  // not change before commit(). Throws if the directory has another writer.
  CheckpointWriter(const std::string& directory, CheckpointIndex index);
  // Removes what was written, unless it was committed.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Each tensor once, in any order.
  void write(const std::string& name, const at::Tensor& tensor);
  // Makes it the checkpoint of the directory. REQUIRES: every tensor was written.
  void commit();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Called with the bytes of tensors converted so far, and in total.
using ConvertProgress = std::function<void(int64_t done, int64_t total)>;

// Converts the optimizer's state in a checkpoint to the file that write_state_dict would write,
// with one tensor in memory at a time.
SHARDSTEP_API void export_state_dict(const std::string& directory, const std::string& path,
                                     const ConvertProgress& progress = nullptr);
// Converts a state dict that Python's torch.save or write_state_dict wrote to a checkpoint, with
// one tensor in memory at a time.
SHARDSTEP_API void import_state_dict(const std::string& path, const std::string& directory,
                                     const ConvertProgress& progress = nullptr);

}  // namespace shardstep
