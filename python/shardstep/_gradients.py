"""Stage 2's gradients, of which each rank has the sums of what it owns: clipping, forgetting,
accumulating, and what a GradScaler finds."""

import contextlib
import math
import sys
from collections.abc import Iterator

import torch

from shardstep._param_groups import ParamGroup
from shardstep._sharded_optimizer import ShardedOptimizer

_UNSCALE = torch.amp.GradScaler._unscale_grads_.__code__


class GradientMethods(ShardedOptimizer):
    """zero_grad, no_sync, clip_grad_norm_ and clip_grad_value_."""

    initialized: bool
    _stage: int

    @property
    def param_groups(self) -> list[ParamGroup]:
        # torch's GradScaler looks for gradients here; in stage 2 the local optimizer has them.
        if self._stage == 2 and sys._getframe(1).f_code is _UNSCALE:
            return self._groups_to_unscale()
        return self._param_groups

    @param_groups.setter
    def param_groups(self, groups: list[ParamGroup]) -> None:
        self._param_groups = groups

    def _groups_to_unscale(self) -> list[ParamGroup]:
        """What this rank owns, and a gradient that is inf everywhere if one is not finite anywhere.

        So every rank skips the step or none does, also one that owns nothing. Collective.
        """
        norm = self.engine.clip_grad_norm(math.inf, math.inf, False)
        verdict = torch.zeros(1, device=self._index_to_param[0].device)
        verdict.grad = torch.full_like(verdict, 0.0 if math.isfinite(norm) else math.inf)
        return [*self.optim.param_groups, {"params": [verdict]}]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients. After a backward pass that threw, call it on every rank."""
        super().zero_grad(set_to_none)
        if self.initialized:
            self.engine.drop_sums()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Stage 2: backward passes add up in `.grad`; the next one behind it takes that along."""
        before, self.engine.sync = self.engine.sync, False
        try:
            yield
        finally:
            self.engine.sync = before

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Stage 2: scales the gradients down to a norm over all of them of at most max_norm.

        Returns what it was, the same on every rank. Collective.
        """
        norm = self.engine.clip_grad_norm(float(max_norm), float(norm_type), error_if_nonfinite)
        return torch.tensor(norm)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Stage 2: clips every element of the gradients. Collective."""
        self.engine.clip_grad_value(float(clip_value))
