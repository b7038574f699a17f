"""Stage 2's gradients, of which each rank holds the sums of what it owns: clipping, clearing,
accumulating, and what generic code finds in `.grad`."""

import contextlib
import weakref
from collections.abc import Callable, Iterator

import torch
from torch.distributed.algorithms.join import Join

from shardstep import _gradient_answers, _gradient_changes  # noqa: F401  (they register)
from shardstep._C import ShardedGradients
from shardstep._param_groups import ParamGroup
from shardstep._sharded_gradient import ShardedGradient
from shardstep._sharded_optimizer import ShardedOptimizer


class GradientMethods(ShardedOptimizer):
    """zero_grad, no_sync, clip_grad_norm_, clip_grad_value_ and full_gradient."""

    initialized: bool
    _stage: int
    _has_inputs: bool
    _announced: bool
    """Whether ranks that have joined have been told of this step."""
    _stand_ins: list[ShardedGradient]
    """By parameter: the `.grad` once the gradient is divided among the ranks."""

    @property
    def param_groups(self) -> list[ParamGroup]:
        # A GradScaler looks for gradients here, and must find them on a rank without a batch too.
        if self._stage == 2 and self.initialized:
            self.engine.show_gradients()
        return self._param_groups

    @param_groups.setter
    def param_groups(self, groups: list[ParamGroup]) -> None:
        self._param_groups = groups

    def _make_stand_ins(self) -> None:
        """Makes stand-ins for the parameters that have none yet."""
        if self.engine.gradients is None:
            return
        this = weakref.ref(self)
        for index, parameter in list(enumerate(self._index_to_param))[len(self._stand_ins) :]:
            stand_in = ShardedGradient(this, parameter, index)
            self._stand_ins.append(stand_in)
            self.engine.set_stand_in(index, stand_in)

    def _take_back_aliases(self) -> None:
        """Restores the stand-in after `p.grad = p.grad.detach()` and the like."""
        parameters = self._index_to_param
        while (index := self.engine.replaced_gradient) >= 0:
            gradient = parameters[index].grad
            if not isinstance(gradient, ShardedGradient) or not gradient.is_alias_of(
                self._stand_ins[index]
            ):
                return
            parameters[index].grad = self._stand_ins[index]

    @property
    def _sharded_gradients(self) -> ShardedGradients:
        """For what all ranks take part in."""
        self._announce()
        return self._own_gradients

    @property
    def _own_gradients(self) -> ShardedGradients:
        """For what a rank does alone, of which those that have joined need not hear."""
        gradients = self.engine.gradients
        assert gradients is not None
        return gradients

    def _announce(self) -> None:
        """Once per step: from here on, ranks that have joined do their share of it."""
        if self._join_config.enable and self._has_inputs and not self._announced:
            self._announced = True
            Join.notify_join_context(self)

    def _own_elements(self, index: int) -> tuple[int, int]:
        """The range that this rank owns of a parameter, in memory order."""
        for local in self._local:
            if local.index == index:
                return local.begin, local.end
        return 0, 0

    def _sum_dtype(self, index: int) -> torch.dtype:
        """In which gradients of a parameter are summed."""
        wide = self.engine.updates_copy(index)
        return torch.float32 if wide else self._index_to_param[index].dtype

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients. After a backward pass that raised, call it on every rank."""
        if not self.initialized:
            super().zero_grad(set_to_none)
        elif set_to_none or self.engine.gradients is None:
            super().zero_grad(set_to_none)
            self.engine.drop_sums()
        else:
            for parameter in self._index_of:
                if parameter.grad is not None and not isinstance(parameter.grad, ShardedGradient):
                    parameter.grad.zero_()
            self.engine.gradients.zero_all()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Stage 2: backward passes inside this context accumulate without communication.

        The first one afterwards reduces the sum.
        """
        before, self.engine.sync = self.engine.sync, False
        try:
            yield
        finally:
            self.engine.sync = before

    def full_gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Returns the whole gradient of a parameter, or None. Collective in stage 2."""
        if self.engine.gradients is not None:
            return self._sharded_gradients.whole(self._index_of.get(parameter))
        if parameter not in self._index_of:
            raise ValueError(
                "shardstep: expected a parameter of this optimizer in full_gradient(), got another "
                f"tensor, of shape {tuple(parameter.shape)} {self._where()}"
            )
        return parameter.grad

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Stage 2: scales the gradients so that their total norm is at most max_norm.

        Returns the norm before scaling, the same on every rank. Collective.
        """
        self._announce()
        norm = self.engine.clip_grad_norm(float(max_norm), float(norm_type), error_if_nonfinite)
        return torch.full((), norm, device=next(iter(self._index_of)).device)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Stage 2: clips every element of the gradients. Collective."""
        self._announce()
        self.engine.clip_grad_value(float(clip_value))


def announce(optimizer: Callable[[], "GradientMethods | None"]) -> None:
    """What the engine calls before the first message of a step."""
    if (this := optimizer()) is not None:
        this._announce()
