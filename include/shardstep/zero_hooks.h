#pragma once

// Communication hooks for DistributedDataParallel that run the optimizer inside the backward pass:
// the given hook reduces a bucket's gradients, each rank updates what it owns of the bucket's
// parameters, and these are sent while the backward pass continues. They have arrived before the
// next forward. Register the result with ddp.register_comm_hook on every rank. No update is lost,
// from the first iteration on: ownership does not depend on DDP's buckets, so DDP may rebuild them.
// The interleaved hook calls a user-defined optimizer once per bucket.

#include "shardstep/distributed_data_parallel.h"
#include "shardstep/export.h"
#include "shardstep/zero_redundancy_optimizer.h"

namespace shardstep {

// Averages a bucket only on the ranks of `zero` that own its parameters, with half the bytes of an
// all-reduce. After the backward pass, `.grad` holds the average where this rank owns the parameter
// and this rank's own gradient elsewhere: enough for `zero`, with step() or inside the hooks below,
// but not for clipping by the norm of all gradients. Parameters that do not belong to the optimizer
// are averaged on every rank. Sums are in rank order if the optimizer's exchange sums in rank
// order.
// REQUIRES: `ddp` and `zero` outlive the hook and have the same ranks; dense gradients.
SHARDSTEP_API CommHook reduce_to_owners_hook(DistributedDataParallelBase& ddp,
                                             ZeroRedundancyOptimizer& zero);

// Updates all parameters when the last bucket has been reduced. Throws ValueError unless `zero` was
// built with overlap_with_ddp. `shard_buckets` has no effect and exists for code ported from
// Python: the parameters of a bucket are always divided among all ranks.
// REQUIRES: `ddp` and `zero` outlive the hook.
SHARDSTEP_API CommHook hook_with_zero_step(CommHook hook, DistributedDataParallelBase& ddp,
                                           ZeroRedundancyOptimizer& zero,
                                           bool shard_buckets = false);

// Updates a bucket's parameters as soon as it has been reduced.
SHARDSTEP_API CommHook hook_with_zero_step_interleaved(CommHook hook,
                                                       DistributedDataParallelBase& ddp,
                                                       ZeroRedundancyOptimizer& zero,
                                                       bool shard_buckets = false);

}  // namespace shardstep
