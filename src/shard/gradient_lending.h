#pragma once

// Stage 1 with Join: a rank that has no inputs left makes its share of a step with gradients that
// it gets from one that has.

#include "shard/shard_engine.h"
#include "shardstep/export.h"

namespace shardstep {

// Ranks without gradients of this step get what they own of them from one that has. Does nothing in
// stage 2. Collective.
SHARDSTEP_API void lend_gradients(ShardEngine& engine, bool has_gradients);

}  // namespace shardstep
