"""Hugging Face accelerate.

    accelerator = shard_with(Accelerator())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

where `optimizer` is a ZeroRedundancyOptimizer of stage 1 or 2. Everything else is accelerate's own:
accumulate(), clip_grad_norm_(), save_state(), load_state().
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from shardstep.integrations._common import no_sync, ours_among, reduces_gradients


def shard_with(accelerator: Any) -> Any:
    """Teaches an Accelerator three things, and returns it. Call it before prepare().

    A model whose optimizer is of stage 2 is not wrapped into DistributedDataParallel; no_sync() and
    accumulate() postpone the reduction of stage 2; save_state() gathers the state on rank 0 first.
    """
    accelerator.prepare = _Prepare(accelerator)
    accelerator.no_sync = _NoSync(accelerator)
    accelerator.register_save_state_pre_hook(_BeforeSave(accelerator))
    return accelerator


class _Prepare:
    """Accelerator.prepare() without DDP where the optimizer reduces gradients."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._prepare = accelerator.prepare

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        known = [*arguments, *self._accelerator._optimizers]
        if not any(map(reduces_gradients, ours_among(known))):
            return self._prepare(*arguments, **options)
        with self._without_ddp():
            return self._prepare(*arguments, **options)

    @contextlib.contextmanager
    def _without_ddp(self) -> Iterator[None]:
        prepare_model = self._accelerator.prepare_model

        def unwrapped(model: Any, device_placement: Any = None, **_: Any) -> Any:
            # What evaluation skips is the wrapping.
            return prepare_model(model, device_placement, evaluation_mode=True)

        self._accelerator.prepare_model = unwrapped
        try:
            yield
        finally:
            del self._accelerator.prepare_model


class _NoSync:
    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._no_sync = accelerator.no_sync

    @contextlib.contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        with self._no_sync(model), no_sync(ours_among(self._accelerator._optimizers)):
            yield


class _BeforeSave:
    """Gathers the state; the ranks that do not write it give an empty one."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __call__(self, *_: Any) -> None:
        for wrapper in self._accelerator._optimizers:
            for optimizer in ours_among([wrapper]):
                optimizer.consolidate_state_dict(to=0)
                if optimizer.rank != 0:
                    wrapper.state_dict = dict
