#pragma once

// The files of a checkpoint: writing one shard, and the index that makes shards a checkpoint.

#include <functional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_index.h"
#include "format/replacing_file.h"

namespace shardstep::detail {

// An id that no other save has.
std::string new_id();

// Creates the directory if need be, and throws unless it is one that may hold a checkpoint.
void prepare_directory(const std::string& directory);

// A file that is only read.
class ReadFile {
 public:
  explicit ReadFile(const std::string& path);
  ~ReadFile();
  ReadFile(const ReadFile&) = delete;
  ReadFile& operator=(const ReadFile&) = delete;

  int64_t size() const { return size_; }
  void read_at(int64_t offset, void* to, int64_t size) const;
  // The whole of a file of at most `most` bytes.
  std::string text(int64_t most) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  int64_t size_ = 0;
};

// The JSON that a safetensors file starts with.
std::string read_shard_header(const ReadFile& file);

// Writes the shard of one rank. Not there under its name before commit(), and then durable.
class ShardWriter {
 public:
  // The tensors of the parts may be undefined.
  ShardWriter(const std::string& directory, ShardContent content, const CheckpointIndex& index,
              int rank);

  int64_t bytes() const { return layout_.bytes; }
  const ShardContent& content() const { return content_; }
  // `on_bytes` hears how many bytes were written, often; what it throws ends the writing.
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

// Makes the shards of all ranks, which must be there, the checkpoint of the directory; then removes
// what belongs to no checkpoint any more. `index` has all but files, tensors, state and values.
void commit_index(const std::string& directory, CheckpointIndex index);

}  // namespace shardstep::detail
