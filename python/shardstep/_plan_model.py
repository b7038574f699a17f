"""What a plan must know of a model and an optimizer: sizes, without any memory for them."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

Shape = Sequence[int]
Model = (
    nn.Module
    | Callable[[], nn.Module]
    | Mapping[str, Shape]
    | Iterable[Shape]
    | Iterable[torch.Tensor]
    | float
)
"""A module on any device, a function that makes one, shapes, or a number of parameters."""


@dataclasses.dataclass(frozen=True)
class Param:
    """A parameter, or part of a model of which only the size is known (`shape` is None)."""

    numel: int
    dtype: torch.dtype
    shape: tuple[int, ...] | None
    trainable: bool = True

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Sizes:
    params: tuple[Param, ...]
    buffer_bytes: int = 0

    def converted(self, dtype: torch.dtype | None) -> "Sizes":
        """With floating-point parameters of another dtype."""
        if dtype is None:
            return self
        params = tuple(
            dataclasses.replace(param, dtype=dtype) if param.dtype.is_floating_point else param
            for param in self.params
        )
        return dataclasses.replace(self, params=params)

    @property
    def trainable(self) -> tuple[Param, ...]:
        return tuple(param for param in self.params if param.trainable)


def sizes_of(model: Model) -> Sizes:
    if isinstance(model, (int, float)):
        if not (model >= 1 and model == int(model)):
            raise ValueError(f"shardstep: expected a number of parameters, got {model}")
        return Sizes((Param(int(model), torch.get_default_dtype(), None),))
    if callable(model) and not isinstance(model, nn.Module):
        with torch.device("meta"):
            made = model()
        if not isinstance(made, nn.Module):
            raise TypeError(
                f"shardstep: expected a function that returns a module, got {type(made).__name__}"
            )
        model = made
    if isinstance(model, nn.Module):
        params = tuple(
            Param(param.numel(), param.dtype, tuple(param.shape), param.requires_grad)
            for param in model.parameters()
        )
        return Sizes(_some(params), sum(buffer.nbytes for buffer in model.buffers()))
    shapes = model.values() if isinstance(model, Mapping) else model
    return Sizes(_some(tuple(map(_param_of_shape, shapes))))


def _some(params: tuple[Param, ...]) -> tuple[Param, ...]:
    if not params:
        raise ValueError("shardstep: expected a model with parameters, got none")
    return params


def _param_of_shape(shape: Any) -> Param:
    if isinstance(shape, torch.Tensor):
        return Param(shape.numel(), shape.dtype, tuple(shape.shape))
    try:
        axes = tuple(int(axis) for axis in shape)
    except (TypeError, ValueError):
        raise TypeError(
            "shardstep: expected a module, a function that makes one, shapes, or a number of "
            f"parameters, got {shape!r} among the shapes"
        ) from None
    numel = 1
    for axis in axes:
        numel *= axis
    return Param(numel, torch.get_default_dtype(), axes)


_SMALL = (31, 37, 41, 43, 47, 53, 59, 61)


class StateSize:
    """The bytes of state that an optimizer keeps for a parameter: those of a step on the meta
    device, which takes neither memory nor time."""

    def __init__(self, optimizer_class: Callable[..., Any], defaults: dict[str, Any]) -> None:
        self._class = optimizer_class
        # The fused kernels do not run on the meta device; their state is the same.
        self._defaults = {k: v for k, v in defaults.items() if k not in ("fused", "capturable")}
        self._of_shape = functools.cache(self._measure)

    def __call__(self, param: Param, dtype: torch.dtype | None = None) -> float:
        """`dtype`: of what the optimizer runs on, if it is not the parameter itself."""
        dtype = dtype or param.dtype
        if param.shape is not None:
            return self._of_shape(param.shape, dtype)
        side = 1024  # state that is not as large as the parameter (step counters) hardly counts
        return self._of_shape((side, side), dtype) * param.numel / (side * side)

    def _measure(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        try:
            return sum(value.nbytes for value in self._state(shape, dtype, "meta"))
        except Exception:
            return self._measure_small(shape, dtype)

    def _measure_small(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """For optimizers that read values, which the meta device has none of: a step on a small
        parameter, each of whose axes has a length of its own, by which they are recognized."""
        lengths = [min(real, small) for real, small in zip(shape, _SMALL, strict=False)]
        real_length = dict(zip(lengths, shape, strict=False))
        try:
            values = self._state(tuple(lengths), dtype, "cpu")
        except Exception as error:
            raise ValueError(
                f"shardstep: cannot tell how much state {self._class} keeps for a parameter of "
                f"shape {shape}, because its step failed: {error}"
            ) from error
        return sum(
            value.element_size() * math.prod(real_length.get(axis, axis) for axis in value.shape)
            for value in values
        )

    def _state(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
        param = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        param.grad = torch.ones_like(param)
        optimizer = self._class([param], **self._defaults)
        optimizer.step()
        values = optimizer.state[param].values()
        return [value for value in values if isinstance(value, torch.Tensor)]
