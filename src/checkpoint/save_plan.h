#pragma once

// What a rank writes when its engine's state is saved, and what the index says besides. Copies
// small values; the tensors of a shard's parts still alias the caller's. Nothing here communicates.

#include <string>
#include <vector>

#include "checkpoint/checkpoint_index.h"
#include "checkpoint/checkpointer.h"

namespace shardstep::detail {

struct SavePlan {
  ShardContent shard;    // this rank's
  CheckpointIndex head;  // the index, less its id and what the shards say
};

// Throws ValueError that names what cannot be saved.
SavePlan plan_save(const ShardEngine& engine, const CheckpointContent& content);

// What must be the same on every rank for their shards to fit together.
std::vector<std::string> comparable_lines(const std::string& directory,
                                          const CheckpointContent& content, SaveMode mode);

}  // namespace shardstep::detail
