#pragma once

// What a rank writes when its engine's state is saved, and what else the index says. Copies small
// values; the tensors of a shard's parts still alias the caller's. Nothing here communicates.

#include <string>
#include <vector>

#include "checkpoint/checkpoint_index.h"
#include "checkpoint/checkpointer.h"

namespace shardstep::detail {

struct SavePlan {
  ShardContent shard;    // this rank's
  CheckpointIndex head;  // the index, without its id and the contents of the shards
};

// Throws a ValueError that names what cannot be saved.
SavePlan plan_save(const ShardEngine& engine, const CheckpointContent& content);

// What must be the same on every rank for the shards to belong together.
std::vector<std::string> comparable_lines(const std::string& directory,
                                          const CheckpointContent& content, SaveMode mode);

}  // namespace shardstep::detail
