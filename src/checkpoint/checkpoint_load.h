#pragma once

// Reads what one rank of an engine needs from a checkpoint, and matches it to the engine. Nothing
// here communicates.

#include "checkpoint/checkpointer.h"

namespace shardstep::detail {

// Throws a ValueError that names what does not fit or is damaged.
LoadedCheckpoint read_checkpoint_for(const ShardEngine& engine, Checkpoint& checkpoint,
                                     const CheckpointTarget& target);

}  // namespace shardstep::detail
