"""What the integrations share: finding our optimizer inside wrappers, and saving its state."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from shardstep.zero_redundancy_optimizer import ZeroRedundancyOptimizer


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside a trainer's wrapper."""
    while not isinstance(optimizer, ZeroRedundancyOptimizer):
        inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "_optimizer", None)
        if inner is None:
            return optimizer
        optimizer = inner
    return optimizer


def ours_among(optimizers: Iterable[Any]) -> list[ZeroRedundancyOptimizer]:
    found = (unwrapped(optimizer) for optimizer in optimizers)
    return [optimizer for optimizer in found if isinstance(optimizer, ZeroRedundancyOptimizer)]


def reduces_gradients(optimizer: ZeroRedundancyOptimizer) -> bool:
    """Stage 2, which must not be under DistributedDataParallel."""
    return optimizer._stage == 2


@contextlib.contextmanager
def no_sync(optimizers: Iterable[ZeroRedundancyOptimizer]) -> Iterator[None]:
    """Backward passes accumulate on each rank; the next one outside reduces the sum."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            if reduces_gradients(optimizer):
                stack.enter_context(optimizer.no_sync())
        yield
