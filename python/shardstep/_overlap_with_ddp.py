"""The update inside DDP's backward pass, for the hooks of ddp_zero_hook."""

import weakref
from typing import Any

import torch

from shardstep._C import OverlappedStep
from shardstep._sharded_optimizer import ShardedOptimizer


class OverlapWithDDP(ShardedOptimizer):
    """What updates parameters bucket by bucket."""

    _overlap_with_ddp: bool
    _overlapped_steps: list[OverlappedStep]

    def _make_overlapped_step(self, ddp: Any, interleaved: bool) -> OverlappedStep:
        zero = weakref.proxy(self)  # the step is not seen by the garbage collector
        step = OverlappedStep(
            lambda gradients, tag: zero._update(gradients, tag),
            lambda: zero._overlap_info.wait_for_broadcasts(),
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
        self._push_options()
        self.engine.before_partial_step(gradients)
        self._may_have_state = True
        self.optim.step()
        self._pull_options()
        pending = self.engine.after_partial_step(gradients, tag)
        if pending is not None:
            self._overlap_info.broadcast_handles.append(pending)

    def _arrive(self) -> None:
        for step in self._overlapped_steps:
            step.arrive()
