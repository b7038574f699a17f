"""Changes of a sharded gradient in place: each rank changes what it owns.

A change must be the same on every rank; step() checks that it was. A GradScaler's unscaling is
collective, since it also looks for what is not finite.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardstep._sharded_gradient import ShardedGradient, first_of, handles, is_plain


def _to_change(gradient: Any, name: str) -> ShardedGradient:
    if not isinstance(gradient, ShardedGradient):
        raise TypeError(f"shardstep: expected a sharded gradient, got {type(gradient).__name__}")
    parameter = gradient._parameter()
    if not is_plain(gradient) or parameter is None or gradient.dtype != parameter.dtype:
        raise gradient._refuse(f"{name} of a copy")
    return gradient


def _number(value: Any) -> float | None:
    """The value of a real number or of a tensor that holds one."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex() or isinstance(value, ShardedGradient):
            return None
        return _last_read.value_of(value)
    return None if isinstance(value, complex) else float(value)


class _LastRead:
    """The number that was last read: clipping scales every gradient by one tensor, and each read
    of it would wait for the device."""

    def __init__(self) -> None:
        self._tensor: Callable[[], torch.Tensor | None] = lambda: None
        self._version = 0
        self._value = 0.0

    def value_of(self, tensor: torch.Tensor) -> float:
        if tensor.is_inference():  # it has no version
            return float(tensor)
        if self._tensor() is not tensor or self._version != tensor._version:
            self._value, self._version = float(tensor), tensor._version
            self._tensor = weakref.ref(tensor)
        return self._value


_last_read = _LastRead()


@handles("mul_", "div_")
def _scale(func: Any, gradient: Any, other: Any, **options: Any) -> Any:
    name = func.overloadpacket.__name__
    if not isinstance(gradient, ShardedGradient):
        raise first_of((other,))._refuse(name)
    factor = _number(other)
    if factor is None or options:
        return _change(func, gradient, other, **options)
    _to_change(gradient, name)
    if name == "div_":
        if _is_power_of_two(factor):
            gradient._gradients().scale([gradient._index], 1 / factor)
            return gradient
        return _change(func, gradient, other)
    gradient._gradients().scale([gradient._index], factor)
    return gradient


def _is_power_of_two(value: float) -> bool:
    """Whether multiplying by the inverse gives the same bits as dividing."""
    return math.isfinite(value) and abs(math.frexp(value)[0]) == 0.5


@handles("_foreach_mul_", "_foreach_div_")
def _foreach_scale(func: Any, gradients: Sequence[Any], other: Any) -> None:
    name = func.overloadpacket.__name__
    others = other if isinstance(other, (list, tuple)) else [other] * len(gradients)
    single = getattr(torch.ops.aten, "mul_" if name == "_foreach_mul_" else "div_").Tensor
    for gradient, one in zip(gradients, others, strict=True):
        if isinstance(gradient, ShardedGradient):
            _scale(single, gradient, one)
        elif name == "_foreach_mul_":
            gradient.mul_(one)
        else:
            gradient.div_(one)


@handles("clamp_")
def _clamp(func: Any, gradient: Any, min: Any = None, max: Any = None) -> Any:
    low, high = (None if limit is None else _number(limit) for limit in (min, max))
    if (min is None) != (low is None) or (max is None) != (high is None):
        return _change(func, gradient, min, max)
    gradient = _to_change(gradient, "clamp_")
    gradient._gradients().clamp([gradient._index], low, high)
    return gradient


@handles("clamp_min_")
def _clamp_min(func: Any, gradient: Any, min: Any) -> Any:
    return _clamp(func, gradient, min, None)


@handles("clamp_max_")
def _clamp_max(func: Any, gradient: Any, max: Any) -> Any:
    return _clamp(func, gradient, None, max)


@handles("_foreach_clamp_min_", "_foreach_clamp_max_")
def _foreach_clamp(func: Any, gradients: Sequence[Any], limit: Any) -> None:
    is_min = func.overloadpacket.__name__ == "_foreach_clamp_min_"
    limits = limit if isinstance(limit, (list, tuple)) else [limit] * len(gradients)
    for gradient, one in zip(gradients, limits, strict=True):
        if isinstance(gradient, ShardedGradient):
            _clamp(func, gradient, *((one, None) if is_min else (None, one)))
        else:
            gradient.clamp_(min=one) if is_min else gradient.clamp_(max=one)


@handles("zero_")
def _zero(func: Any, gradient: ShardedGradient) -> ShardedGradient:
    _to_change(gradient, "zero_")._zero()._own_gradients.zero(gradient._index)
    return gradient


@handles("_foreach_zero_")
def _foreach_zero(func: Any, gradients: Sequence[Any]) -> None:
    for gradient in gradients:
        gradient.zero_()


@handles("_amp_foreach_non_finite_check_and_unscale_")
def _unscale(
    func: Any, gradients: Sequence[Any], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """Called by a GradScaler. Sets found_inf to the same value on every rank."""
    ours = [g for g in gradients if isinstance(g, ShardedGradient)]
    whole = [g for g in gradients if not isinstance(g, ShardedGradient)]
    if whole:
        func(whole, found_inf, inv_scale)
    by_owner: dict[int, list[ShardedGradient]] = {}
    for gradient in ours:
        _to_change(gradient, "unscaling")
        by_owner.setdefault(id(gradient._zero()), []).append(gradient)
    for some in by_owner.values():
        indices = [gradient._index for gradient in some]
        sharded = some[0]._gradients()
        if not sharded.all_finite(indices):
            found_inf.fill_(1.0)
        sharded.scale(indices, float(inv_scale))


@handles(
    "add_",
    "sub_",
    "addcmul_",
    "addcdiv_",
    "lerp_",
    "copy_",
    "fill_",
    "neg_",
    "abs_",
    "sign_",
    "nan_to_num_",
    "masked_fill_",
    "square_",
    "sqrt_",
    "pow_",
    "tanh_",
)
def _change(func: Any, gradient: Any, *args: Any, **options: Any) -> Any:
    """Applies any pointwise in-place operation to the elements that this rank owns."""
    name = func.overloadpacket.__name__
    if not isinstance(gradient, ShardedGradient):  # it is what another tensor is changed by
        raise first_of(args)._refuse(name)
    gradient = _to_change(gradient, name)
    sharded = gradient._gradients()
    own = sharded.own(gradient._index)
    if own is not None:
        args = tuple(_own_part(gradient, arg, name) for arg in args)
        options = {key: _own_part(gradient, value, name) for key, value in options.items()}
        func(own, *args, **options)
    numbers = [a for a in (*args, *options.values()) if isinstance(a, (int, float, complex))]
    sharded.changed(gradient._index, f"{name} {numbers}")
    return gradient


def _own_part(gradient: ShardedGradient, value: Any, name: str) -> Any:
    """The elements of an operand that correspond to what this rank owns of the gradient."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, ShardedGradient):
        if not is_plain(value) or value._index != gradient._index:
            raise gradient._refuse(f"{name} with another sharded gradient")
        own = value._gradients().own(value._index)
        return own if own is None or value.dtype == gradient.dtype else own.to(value.dtype)
    if value.dim() == 0:
        return value
    parameter = gradient._parameter()
    assert parameter is not None
    whole = torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=value.dtype, device=value.device
    )
    whole.copy_(value.detach())
    begin, end = gradient._zero()._own_elements(gradient._index)
    return whole.as_strided((parameter.numel(),), (1,))[begin:end]
