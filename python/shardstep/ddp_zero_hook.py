"""Communication hooks that run the update inside DistributedDataParallel's backward pass.

The given hook reduces a bucket's gradients, each rank updates what it owns of the bucket's
parameters, and these are sent while the backward pass continues; when backward() returns, they have
arrived on every rank. No update is lost, from the first iteration on.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from shardstep._C import OverlappedStep
from shardstep.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def hook_with_zero_step(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> Hook:
    """Makes a hook for ddp.register_comm_hook that updates all parameters after the last bucket.

    Raises ValueError unless `zero` was built with overlap_with_ddp=True. `shard_buckets` has no
    effect and exists for code that sets it: `zero` alone decides which ranks own a bucket's
    parameters.
    """
    return _make_hook(hook, ddp, zero, shard_buckets, interleaved=False)


def hook_with_zero_step_interleaved(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> Hook:
    """Makes a hook that updates a bucket's parameters as soon as the bucket has been reduced."""
    return _make_hook(hook, ddp, zero, shard_buckets, interleaved=True)


def _make_hook(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool,
    interleaved: bool,
) -> Hook:
    if not isinstance(zero, ZeroRedundancyOptimizer):
        raise TypeError(
            f"shardstep: expected shardstep's ZeroRedundancyOptimizer, got {type(zero).__name__}"
        )
    if not zero._overlap_with_ddp:
        raise ValueError(
            "shardstep: expected an optimizer with overlap_with_ddp=True, got one without"
        )
    zero._overlap_info.shard_buckets = shard_buckets
    ddp_ref = weakref.ref(ddp)  # DDP will hold the hook
    step: OverlappedStep | None = None

    def reduce_and_update(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal step
        if step is None:  # by now DDP knows whether its graph is static
            step = zero._make_overlapped_step(ddp_ref(), interleaved)
        future = hook(state, bucket)
        zero._overlap_info.see(bucket, future, zero.rank, zero._ranks_of)
        step.reducing(bucket, future)
        return future

    return reduce_and_update
