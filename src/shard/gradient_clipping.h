#pragma once

// Stage 2: clipping of gradients that are divided among the ranks, as torch.nn.utils clips whole
// ones. Collective.

#include "shard/shard_engine.h"
#include "shardstep/export.h"

namespace shardstep {

// Scales the gradients so that their total norm is at most max_norm, and returns the norm before
// scaling, the same on every rank. `norm_type` may be infinite.
SHARDSTEP_API double clip_grad_norm(ShardEngine& engine, double max_norm, double norm_type,
                                    bool error_if_nonfinite);

SHARDSTEP_API void clip_grad_value(ShardEngine& engine, double clip_value);

}  // namespace shardstep
