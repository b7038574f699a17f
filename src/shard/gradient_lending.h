#pragma once

// Stage 1 with Join: a rank that has no inputs left does its share of a step with gradients from a
// rank that has.

#include "shard/shard_engine.h"
#include "shardstep/export.h"

namespace shardstep {

// Ranks without gradients for this step get what they own of them from a rank that has. Does
// nothing in stage 2. Collective.
SHARDSTEP_API void lend_gradients(ShardEngine& engine, bool has_gradients);

}  // namespace shardstep
