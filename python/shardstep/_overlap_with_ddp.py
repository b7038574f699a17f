"""The update inside DDP's backward pass, for the hooks of ddp_zero_hook."""

import weakref
from typing import Any

import torch

from shardstep._C import OverlappedStep
from shardstep._sharded_optimizer import ShardedOptimizer
from shardstep._step_hooks import without_hooks_of_all_optimizers


class OverlapWithDDP(ShardedOptimizer):
    """Updates parameters bucket by bucket."""

    _overlap_with_ddp: bool
    _overlapped_steps: list[OverlappedStep]
    _update_error: Exception | None
    found_inf: torch.Tensor  # this and the next only while a GradScaler calls step()
    grad_scale: torch.Tensor | None

    def _refuse_scaler(self) -> None:
        """In step(). A GradScaler leaves there what a step needs to unscale and to skip."""
        if not hasattr(self, "found_inf"):
            return
        del self.found_inf, self.grad_scale
        raise ValueError(
            "shardstep: expected a GradScaler with an optimizer that updates in step(), got one "
            "with overlap_with_ddp=True, which updates inside the backward pass, before gradients "
            f"are unscaled; leave out one of the two {self._where()}"
        )

    def _make_overlapped_step(self, ddp: Any, interleaved: bool) -> OverlappedStep:
        zero = weakref.proxy(self)  # the garbage collector cannot see into the step
        step = OverlappedStep(
            lambda gradients, tag: zero._update(gradients, tag),
            lambda: zero._end_updates(),
            lambda: zero._wait_for_updates(),
            interleaved=interleaved,
            static_graph=ddp.static_graph,
            find_unused_parameters=ddp.find_unused_parameters,
            any_order=self.engine.any_order,
        )
        self._overlapped_steps.append(step)
        return step

    def _update(self, params: list[tuple[torch.Tensor, torch.Tensor]], tag: int) -> None:
        """Updates what this rank owns of these parameters, and starts sending it."""
        gradients = [(self._index_of[p], g) for p, g in params if p in self._index_of]
        try:
            self._push_options()
            self.engine.before_partial_step(gradients)
            self._may_have_state = True
            with without_hooks_of_all_optimizers():
                self.optim.step()
            self._pull_options()
        except Exception as error:
            if self.world_size == 1:
                raise
            # The others wait for the parameters: all ranks raise when these have arrived.
            self._update_error = self._update_error or error
        pending = self.engine.after_partial_step(gradients, tag)
        if pending is not None:
            self._overlap_info.broadcast_handles.append(pending)

    def _end_updates(self) -> None:
        """After the last update of an iteration. Collective; does not wait."""
        error = self._update_error
        self.engine.end_partial_steps(None if error is None else f"{type(error).__name__}: {error}")

    def _wait_for_updates(self) -> None:
        """Raises on every rank if an update has, or the parameters are not the same."""
        self._overlap_info.wait_for_broadcasts()
        self.engine.wait()
        error, self._update_error = self._update_error, None
        if error is not None:
            raise error

    def _arrive(self) -> None:
        for step in self._overlapped_steps:
            step.arrive()
