#pragma once

// Communication hooks for DistributedDataParallel that run the optimizer inside the backward pass:
// the given hook reduces a bucket's gradients, each rank updates what it owns of its parameters,
// and these travel while the backward pass goes on. Before the next forward they have arrived.
// Register the result with ddp.register_comm_hook on every rank. From the first iteration on every
// update is made: who owns what does not depend on DDP's buckets, so their rebuilding does not
// matter. A user's own optimizer is called once per bucket by the interleaved hook.

#include "shardstep/distributed_data_parallel.h"
#include "shardstep/export.h"
#include "shardstep/zero_redundancy_optimizer.h"

namespace shardstep {

// Averages a bucket on those ranks of `zero` that own its parameters, with half the bytes of an
// all-reduce. Behind the backward pass `.grad` holds the average where this rank owns the
// parameter, and elsewhere its own gradient: enough for `zero`, with step() or inside the hooks
// below, but not to clip by the norm of all gradients. Parameters that are not the optimizer's are
// averaged on every rank. Sums are taken in rank order where the optimizer's exchange does so.
// REQUIRES: `ddp` and `zero` outlive the hook and have the same ranks; dense gradients.
SHARDSTEP_API CommHook reduce_to_owners_hook(DistributedDataParallelBase& ddp,
                                             ZeroRedundancyOptimizer& zero);

// Updates all parameters when the last bucket has been reduced. Throws ValueError unless `zero` was
// built with overlap_with_ddp. `shard_buckets` is there for code that is ported from Python: the
// parameters of a bucket are always shared out among all ranks, as the optimizer was built to.
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
