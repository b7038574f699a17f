#pragma once

// The files of a checkpoint: writing one shard, and the index that makes shards a checkpoint.
//
// A reader holds a shared lock on the index that it read. A save that replaces the index first
// gives it a second name, index-<id>.json, and removes it and its shards only if no one reads them.
// Modelled in proofs/checkpoint_commit.pml.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_index.h"
#include "format/replacing_file.h"
#include "shardstep/export.h"

namespace shardstep::detail {

// An id that no other save has.
SHARDSTEP_API std::string new_id();

// Creates the directory durably if it does not exist.
void make_directory(const std::string& directory);
// Throws ValueError if the directory has an index.json that does not belong to a checkpoint.
void check_replaceable(const std::string& directory);

// The id of the checkpoint in a directory, if there is one. Reads only the first bytes of the
// index.
std::optional<std::string> current_id(const std::string& directory);

// Whatever is in a directory that can be listed.
std::vector<std::string> names_in_directory(const std::string& directory);
// Removes an index, or the second name of one, unless it is being read. Returns whether it did.
bool retire_index(const std::string& path);

// A file that is only read.
class ReadFile {
 public:
  explicit ReadFile(const std::string& path);
  ~ReadFile();
  ReadFile(const ReadFile&) = delete;
  ReadFile& operator=(const ReadFile&) = delete;

  int64_t size() const { return size_; }
  // Keeps writers from removing the file during the lifetime of this object. False if it is already
  // being removed.
  bool lock_shared();
  // Whether it still has its name.
  bool is_in_place() const;
  void read_at(int64_t offset, void* to, int64_t size) const;
  // The first bytes, at most `most`.
  std::string head(int64_t most) const;
  // The whole of a file of at most `most` bytes.
  std::string text(int64_t most) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  int64_t size_ = 0;
  bool locked_ = false;
};

// The index of a directory, with a reader's lock during the lifetime of the object.
std::unique_ptr<ReadFile> open_index(const std::string& directory);

// The JSON that a safetensors file starts with.
std::string read_shard_header(const ReadFile& file);

// Writes the shard of one rank. It has its final name, durably, only after commit().
class SHARDSTEP_API ShardWriter {
 public:
  // The tensors of the parts may be undefined.
  ShardWriter(const std::string& directory, ShardContent content, const CheckpointIndex& index,
              int rank);
  ~ShardWriter();

  int64_t bytes() const { return layout_.bytes; }
  const ShardContent& content() const { return content_; }
  // Calls `on_bytes` often, with the bytes written; an exception from it ends the writing.
  void write(size_t part, const at::Tensor& tensor,
             const std::function<void(int64_t)>& on_bytes = nullptr);
  void commit();

 private:
  ShardContent content_;
  const CheckpointIndex& index_;
  int rank_;
  std::vector<std::vector<uint32_t>> checksums_;
  ShardLayout layout_;
  ReplacingFile file_;
};

// Makes the shards of all ranks the checkpoint of the directory; then removes what belongs to no
// checkpoint any more. `index` has everything except files, tensors, state and values.
// REQUIRES: the shards exist; the caller holds the DirectoryLock.
SHARDSTEP_API void commit_index(const std::string& directory, CheckpointIndex index);

// Removes one shard, unless the index of the directory names it.
void remove_shard(const std::string& directory, const std::string& id, int rank);

}  // namespace shardstep::detail
