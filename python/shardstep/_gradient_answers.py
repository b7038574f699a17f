"""What a sharded gradient answers: norms, sums, checks for finiteness, and views of itself.

Collective: the first question of a kind after a change is answered for all parameters by one
exchange. Ranks that are already in step() answer too, so that one rank alone may ask before its
step().
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from shardstep._sharded_gradient import ShardedGradient, first_of, handles, is_plain


def _whole_of(func: Any, gradient: ShardedGradient, dim: Any) -> None:
    if (
        dim is not None
        and list(dim)
        and sorted(d % gradient.dim() for d in dim) != list(range(gradient.dim()))
    ):
        raise gradient._refuse(f"{func.overloadpacket.__name__} over some dimensions")


# -- norms and sums ------------------------------------------------------------------------------


@handles("linalg_vector_norm")
def _vector_norm(
    func: Any,
    gradient: ShardedGradient,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    _whole_of(func, gradient, dim)
    if keepdim or gradient._kind not in ("gradient", "absolute value"):
        raise gradient._refuse("a norm")
    real = torch.finfo(
        dtype or gradient._norm_dtype()
    ).dtype  # for a complex dtype, that of its parts
    return gradient._answer(gradient._norm(float(ord)), getattr(torch, str(real)))


@handles("norm")
def _norm(
    func: Any, gradient: ShardedGradient, p: float | None = 2, *rest: Any, **options: Any
) -> torch.Tensor:
    return _vector_norm(func, gradient, 2 if p is None else p, *rest, **options)


@handles("_foreach_norm")
def _foreach_norm(
    func: Any, gradients: Sequence[torch.Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    return [
        _vector_norm(func, g, ord, dtype=dtype)
        if isinstance(g, ShardedGradient)
        else torch.linalg.vector_norm(g, ord, dtype=dtype)
        for g in gradients
    ]


def _sum_of(gradient: ShardedGradient) -> float:
    kind = gradient._kind
    if kind == "gradient" and not gradient.is_complex():
        return gradient._sum()
    if kind == "absolute value":
        return gradient._norm(1.0)
    if kind == "square" and not gradient.is_complex():
        return gradient._norm(2.0) ** 2
    if kind == "is nan":
        return gradient._count("nans")
    if kind == "is infinite":
        return gradient._count("infinities")
    if kind == "is finite":
        return gradient.numel() - gradient._count("nans") - gradient._count("infinities")
    if kind == "is not finite":
        return gradient._count("nans") + gradient._count("infinities")
    raise gradient._refuse("a sum")


@handles("sum")
def _sum(
    func: Any,
    gradient: ShardedGradient,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    _whole_of(func, gradient, dim)
    if dtype is None and gradient.dtype == torch.bool:
        dtype = torch.int64
    total = _sum_of(gradient)
    return gradient._answer(int(total) if dtype == torch.int64 else total, dtype)


@handles("mean")
def _mean(
    func: Any,
    gradient: ShardedGradient,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    _whole_of(func, gradient, dim)
    return gradient._answer(_sum_of(gradient) / max(gradient.numel(), 1), dtype)


@handles("var", "std")
def _var(func: Any, gradient: ShardedGradient, dim: Any = None, **options: Any) -> torch.Tensor:
    _whole_of(func, gradient, dim)
    correction = options.get("correction")
    if not is_plain(gradient) or gradient.is_complex() or options.get("keepdim"):
        raise gradient._refuse(func.overloadpacket.__name__)
    count = gradient.numel()
    rest = count - (1 if correction is None else correction)
    squares = gradient._norm(2.0) ** 2 - gradient._sum() ** 2 / max(count, 1)
    variance = max(squares, 0.0) / rest if rest > 0 else math.nan
    if math.isnan(squares):
        variance = math.nan
    is_std = func.overloadpacket.__name__ == "std"
    return gradient._answer(math.sqrt(variance) if is_std else variance)


@handles("max", "amax")
def _largest(func: Any, gradient: ShardedGradient, dim: Any = None) -> torch.Tensor:
    _whole_of(func, gradient, [dim] if isinstance(dim, int) else dim)
    if gradient._kind == "absolute value":
        return gradient._answer(gradient._norm(math.inf))
    if gradient._kind == "square":
        return gradient._answer(gradient._norm(math.inf) ** 2)
    if not is_plain(gradient):
        raise gradient._refuse("the largest element")
    return gradient._answer(gradient._statistic("largest"))


@handles("min", "amin")
def _smallest(func: Any, gradient: ShardedGradient, dim: Any = None) -> torch.Tensor:
    _whole_of(func, gradient, [dim] if isinstance(dim, int) else dim)
    if not is_plain(gradient):
        raise gradient._refuse("the smallest element")
    return gradient._answer(gradient._statistic("smallest"))


@handles("all")
def _all(func: Any, gradient: ShardedGradient) -> torch.Tensor:
    if gradient.dtype != torch.bool:
        raise gradient._refuse("all")
    return gradient._answer(_sum_of(gradient) == gradient.numel(), torch.bool)


@handles("any")
def _any(func: Any, gradient: ShardedGradient) -> torch.Tensor:
    if gradient.dtype != torch.bool:
        raise gradient._refuse("any")
    return gradient._answer(_sum_of(gradient) > 0, torch.bool)


_KINDS = {
    "abs": "absolute value",
    "square": "square",
    "isnan": "is nan",
    "isinf": "is infinite",
}


@handles(*_KINDS)
def _elementwise(func: Any, gradient: ShardedGradient) -> ShardedGradient:
    name = func.overloadpacket.__name__
    if not is_plain(gradient):
        raise gradient._refuse(name)
    if name in ("isnan", "isinf"):
        return gradient._derive(_KINDS[name], torch.bool)
    if name == "abs" and gradient.is_complex():
        return gradient._derive(_KINDS[name], torch.empty(0, dtype=gradient.dtype).real.dtype)
    return gradient._derive(_KINDS[name])


@handles("pow")
def _pow(func: Any, gradient: Any, exponent: Any) -> ShardedGradient:
    if not is_plain(gradient) or exponent != 2:
        raise first_of((gradient, exponent))._refuse("pow")
    return gradient._derive("square")  # type: ignore[no-any-return]


@handles("bitwise_not", "logical_not")
def _not(func: Any, gradient: ShardedGradient) -> ShardedGradient:
    opposite = {"is finite": "is not finite", "is not finite": "is finite"}
    if gradient._kind not in opposite:
        raise gradient._refuse("not")
    return gradient._derive(opposite[gradient._kind])


# -- other views of the same gradient ------------------------------------------------------------


@handles("detach", "alias")
def _alias(func: Any, gradient: ShardedGradient, *_: Any) -> ShardedGradient:
    return gradient._derive(gradient._kind)


@handles("detach_")
def _itself(func: Any, gradient: ShardedGradient, *_: Any) -> ShardedGradient:
    return gradient


@handles("_to_copy")
def _to_copy(func: Any, gradient: ShardedGradient, **options: Any) -> ShardedGradient:
    """A view in a wider dtype, good for norms; in-place changes of it are refused."""
    device = options.get("device")
    if device is not None and torch.device(device) != gradient.device:
        raise gradient._refuse(f"a copy on {device}")
    dtype = options.get("dtype") or gradient.dtype
    parameter = gradient._parameter()
    assert parameter is not None
    if not is_plain(gradient) or torch.promote_types(parameter.dtype, dtype) != dtype:
        raise gradient._refuse(f"a copy in {dtype}")  # rounded, which its answers would not be
    return gradient._derive("gradient", dtype)


@handles("zeros_like", "ones_like", "empty_like", "full_like")
def _like(func: Any, gradient: ShardedGradient, *args: Any, **options: Any) -> Any:
    parameter = gradient._parameter()
    assert parameter is not None
    return func(parameter.detach(), *args, **options)
