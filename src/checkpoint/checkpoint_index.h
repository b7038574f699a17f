#pragma once

// The text of index.json and of the headers of shards, and its checks.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "format/json.h"
#include "shardstep/checkpoint.h"

namespace shardstep::detail {

constexpr const char* kIndexName = "index.json";
constexpr int64_t kMostHeaderBytes = int64_t{1} << 30;

// A tensor's part that one rank writes. `tensor` has the elements in memory order, in any shape.
struct ShardPart {
  std::string name;
  CheckpointTensor whole;  // without parts
  Range elements;
  at::Tensor tensor;
};

// What one rank contributes: its parts, and what else the index says about its parameters.
struct ShardContent {
  std::vector<ShardPart> parts;
  std::map<int64_t, std::vector<std::string>> state;
  std::map<std::string, c10::IValue> values;
};

// Dtype, shape and memory order; no parts yet.
SHARDSTEP_API CheckpointTensor describe(const at::Tensor& tensor);

// The prefix of the names of an id's shards.
std::string shard_prefix(const std::string& id);
std::string shard_name(const std::string& id, int rank);
// Whether a file is a shard, whole or not, or a temporary index.
bool is_save_file(const std::string& name);

// The second name of an index that was replaced, and the id in such a name.
std::string previous_index_name(const std::string& id);
std::optional<std::string> id_of_previous_index(const std::string& name);

// The layout of a shard: the offsets of its parts, and the header. The header's length does not
// depend on the checksums.
struct ShardLayout {
  std::vector<int64_t> offsets;  // of each part, in the file
  int64_t bytes = 0;             // of the file
  std::string header;
};
ShardLayout layout_of(const ShardContent& content, const CheckpointIndex& index, int rank,
                      const std::vector<std::vector<uint32_t>>& checksums);

// Adds the contents of a shard's header to an index. Throws ValueError unless it belongs to it.
void merge_shard(std::string_view header, int rank, int64_t file_bytes, CheckpointIndex& index);

// Throws ValueError unless param groups and state name each parameter, tensor and value once.
void check_state(const CheckpointIndex& index);
// Also throws unless every element of every tensor exists once, without overlap.
void check_index(const CheckpointIndex& index);

// The text is a JSON object whose first key, "crc-32", has the checksum of all that follows, and
// whose second is the id.
std::string index_to_text(const CheckpointIndex& index);
// How many bytes from the start the next two functions need.
constexpr int64_t kIndexHeadBytes = 64;
// Whether a file with this beginning can be an index.
bool is_index_text(std::string_view head);
// The id, where it is the second key.
std::optional<std::string> id_in_head(std::string_view head);
// The id, wherever it is.
std::optional<std::string> id_of_index(std::string_view text);
// Reads an index and checks it.
CheckpointIndex index_from_text(std::string_view text);

}  // namespace shardstep::detail
