#pragma once

// Reading of a checkpoint what one rank of an engine needs, and matching it to what the engine has.
// Nothing here communicates.

#include "checkpoint/checkpointer.h"

namespace shardstep::detail {

// Throws ValueError that names what does not fit or is damaged.
LoadedCheckpoint read_checkpoint_for(const ShardEngine& engine, Checkpoint& checkpoint,
                                     const CheckpointTarget& target);

}  // namespace shardstep::detail
