"""The `p.grad` of stage 2, when the gradient is divided among the ranks: a tensor without memory
that answers as the whole gradient would.

Norms, sums and checks for finiteness are collective: the first of a kind after a change is answered
for all parameters by one exchange. Ranks that are already in step() answer too, so that one rank
alone may ask before its step(). In-place changes act on what this rank owns, and must be the same
on every rank; step() checks that they were.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from shardstep._C import ShardedGradients

Handler = Callable[..., Any]


class Owner(Protocol):
    """What a gradient needs of its optimizer."""

    @property
    def _sharded_gradients(self) -> ShardedGradients: ...

    def _own_elements(self, index: int) -> tuple[int, int]: ...

    def _sum_dtype(self, index: int) -> torch.dtype: ...

    def _where(self) -> str: ...


class ShardedGradient(torch.Tensor):
    """The gradient of one parameter, or something computed from each of its elements."""

    _owner: "weakref.ref[Owner]"
    _parameter: "weakref.ref[torch.Tensor]"
    _index: int
    _kind: str  # what its elements are

    is_sharded = True

    @staticmethod
    def __new__(
        cls,
        owner: "weakref.ref[Owner]",
        parameter: torch.Tensor,
        index: int,
        kind: str = "gradient",
        dtype: torch.dtype | None = None,
    ) -> "ShardedGradient":
        self: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=dtype or parameter.dtype,
            device=parameter.device,
        )
        self._owner, self._index, self._kind = owner, index, kind
        self._parameter = weakref.ref(parameter)
        return self

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # These are decomposed before they would reach __torch_dispatch__.
        if func in _IS_FINITE and isinstance(args[0], cls):
            return args[0]._derive("is finite", torch.bool)
        if func in _WITHOUT_MEMORY:
            raise args[0]._refuse(getattr(func, "__name__", str(func)))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        handler = _HANDLERS.get(name)
        if handler is not None:
            return handler(func, *args, **(kwargs or {}))
        if name in _POINTWISE and isinstance(args[0], cls):
            return _change(func, *args, **(kwargs or {}))
        raise _first_of(cls, args)._refuse(name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"ShardedGradient(parameter {self._index}, {self._kind}, size={tuple(self.shape)}, "
            f"dtype={self.dtype}, device='{self.device}')"
        )

    def _zero(self) -> Owner:
        owner = self._owner()
        if owner is None:
            raise RuntimeError(
                "shardstep: expected the gradient of an optimizer that still exists, got that of "
                f"parameter {self._index}, whose optimizer no longer exists"
            )
        return owner

    def _gradients(self) -> ShardedGradients:
        return self._zero()._sharded_gradients

    def _derive(self, kind: str, dtype: torch.dtype | None = None) -> "ShardedGradient":
        parameter = self._parameter()
        assert parameter is not None
        return ShardedGradient(
            self._owner, parameter, self._index, kind, self.dtype if dtype is None else dtype
        )

    def _refuse(self, name: str) -> Exception:
        owner = self._owner()
        return NotImplementedError(
            f"shardstep: expected a norm, a sum, a check for finiteness or an in-place change of a "
            f"gradient that is divided among the ranks (stage 2), got {name} of "
            f"{'it' if self._kind == 'gradient' else 'its ' + self._kind}; call "
            f"optimizer.full_gradient(p) on every rank for the whole gradient of parameter "
            f"{self._index} {owner._where() if owner is not None else ''}".rstrip()
        )

    def is_alias_of(self, other: "ShardedGradient") -> bool:
        """Whether both are the gradient of the same parameter of the same optimizer."""
        return (
            self._owner() is other._owner()
            and self._index == other._index
            and self._kind == other._kind == "gradient"
            and self.dtype == other.dtype
        )

    # -- what is known about the whole gradient ----------------------------------------------------

    def _statistic(self, name: str, norm_type: float = 0.0) -> float:
        return self._gradients().statistic(self._index, name, norm_type)

    def _norm(self, norm_type: float) -> float:
        return self._statistic("norm", norm_type)

    def _norm_dtype(self) -> torch.dtype:
        """A norm has the dtype of the sums, which may be wider than the gradient's."""
        parameter = self._parameter()
        same = parameter is not None and parameter.dtype == self.dtype
        return self._zero()._sum_dtype(self._index) if same else self.dtype

    def _sum(self) -> float:
        return self._statistic("sum")

    def _is_finite(self) -> bool:
        return self._gradients().all_finite([self._index])

    def _count(self, what: str) -> float:
        return 0.0 if self._is_finite() else self._statistic(what)

    def _answer(self, value: float, dtype: torch.dtype | None = None) -> torch.Tensor:
        # Unlike torch.tensor, this need not wait for a copy to the device.
        return torch.full((), value, dtype=dtype or self.dtype, device=self.device)


def _first_of(cls: type, args: Any) -> Any:
    for arg in args:
        if isinstance(arg, cls):
            return arg
        if isinstance(arg, (list, tuple)) and (found := _first_of(cls, arg)) is not None:
            return found
    return None


def _is_plain(gradient: Any) -> bool:
    """Whether this is the gradient itself, in any dtype."""
    return isinstance(gradient, ShardedGradient) and gradient._kind == "gradient"


def _whole_of(func: Any, gradient: ShardedGradient, dim: Any) -> None:
    if (
        dim is not None
        and list(dim)
        and sorted(d % gradient.dim() for d in dim) != list(range(gradient.dim()))
    ):
        raise gradient._refuse(f"{func.overloadpacket.__name__} over some dimensions")


# -- norms and sums ------------------------------------------------------------------------------


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


def _var(func: Any, gradient: ShardedGradient, dim: Any = None, **options: Any) -> torch.Tensor:
    _whole_of(func, gradient, dim)
    correction = options.get("correction")
    if not _is_plain(gradient) or gradient.is_complex() or options.get("keepdim"):
        raise gradient._refuse(func.overloadpacket.__name__)
    count = gradient.numel()
    rest = count - (1 if correction is None else correction)
    squares = gradient._norm(2.0) ** 2 - gradient._sum() ** 2 / max(count, 1)
    variance = max(squares, 0.0) / rest if rest > 0 else math.nan
    if math.isnan(squares):
        variance = math.nan
    is_std = func.overloadpacket.__name__ == "std"
    return gradient._answer(math.sqrt(variance) if is_std else variance)


def _largest(func: Any, gradient: ShardedGradient, dim: Any = None) -> torch.Tensor:
    _whole_of(func, gradient, [dim] if isinstance(dim, int) else dim)
    if gradient._kind == "absolute value":
        return gradient._answer(gradient._norm(math.inf))
    if gradient._kind == "square":
        return gradient._answer(gradient._norm(math.inf) ** 2)
    if not _is_plain(gradient):
        raise gradient._refuse("the largest element")
    return gradient._answer(gradient._statistic("largest"))


def _smallest(func: Any, gradient: ShardedGradient, dim: Any = None) -> torch.Tensor:
    _whole_of(func, gradient, [dim] if isinstance(dim, int) else dim)
    if not _is_plain(gradient):
        raise gradient._refuse("the smallest element")
    return gradient._answer(gradient._statistic("smallest"))


def _all(func: Any, gradient: ShardedGradient) -> torch.Tensor:
    if gradient.dtype != torch.bool:
        raise gradient._refuse("all")
    return gradient._answer(_sum_of(gradient) == gradient.numel(), torch.bool)


def _any(func: Any, gradient: ShardedGradient) -> torch.Tensor:
    if gradient.dtype != torch.bool:
        raise gradient._refuse("any")
    return gradient._answer(_sum_of(gradient) > 0, torch.bool)


def _elementwise(kind: str, dtype: torch.dtype | None = None) -> Handler:
    def handle(func: Any, gradient: ShardedGradient) -> ShardedGradient:
        if not _is_plain(gradient):
            raise gradient._refuse(func.overloadpacket.__name__)
        if kind == "absolute value" and gradient.is_complex():
            return gradient._derive(kind, torch.empty(0, dtype=gradient.dtype).real.dtype)
        return gradient._derive(kind, dtype)

    return handle


def _pow(func: Any, gradient: Any, exponent: Any) -> ShardedGradient:
    if not _is_plain(gradient) or exponent != 2:
        raise _first_of(ShardedGradient, (gradient, exponent))._refuse("pow")
    return gradient._derive("square")  # type: ignore[no-any-return]


def _not(func: Any, gradient: ShardedGradient) -> ShardedGradient:
    opposite = {"is finite": "is not finite", "is not finite": "is finite"}
    if gradient._kind not in opposite:
        raise gradient._refuse("not")
    return gradient._derive(opposite[gradient._kind])


# -- other views of the same gradient --------------------------------------------------------------


def _alias(func: Any, gradient: ShardedGradient, *_: Any) -> ShardedGradient:
    return gradient._derive(gradient._kind)


def _itself(func: Any, gradient: ShardedGradient, *_: Any) -> ShardedGradient:
    return gradient


def _to_copy(func: Any, gradient: ShardedGradient, **options: Any) -> ShardedGradient:
    """A view in another dtype, good for norms; in-place changes of it are refused."""
    device = options.get("device")
    if device is not None and torch.device(device) != gradient.device:
        raise gradient._refuse(f"a copy on {device}")
    if not _is_plain(gradient) or options.get("dtype") == torch.bool:
        raise gradient._refuse("a copy")
    return gradient._derive("gradient", options.get("dtype"))


def _like(func: Any, gradient: ShardedGradient, *args: Any, **options: Any) -> Any:
    parameter = gradient._parameter()
    assert parameter is not None
    return func(parameter.detach(), *args, **options)


# -- changes in place ------------------------------------------------------------------------------


def _to_change(gradient: Any, name: str) -> ShardedGradient:
    if not isinstance(gradient, ShardedGradient):
        raise TypeError(f"shardstep: expected a sharded gradient, got {type(gradient).__name__}")
    parameter = gradient._parameter()
    if not _is_plain(gradient) or parameter is None or gradient.dtype != parameter.dtype:
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


def _scale(func: Any, gradient: Any, other: Any, **options: Any) -> Any:
    name = func.overloadpacket.__name__
    if not isinstance(gradient, ShardedGradient):
        raise _first_of(ShardedGradient, (other,))._refuse(name)
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


def _clamp(func: Any, gradient: Any, min: Any = None, max: Any = None) -> Any:
    low, high = (None if limit is None else _number(limit) for limit in (min, max))
    if (min is None) != (low is None) or (max is None) != (high is None):
        return _change(func, gradient, min, max)
    gradient = _to_change(gradient, "clamp_")
    gradient._gradients().clamp([gradient._index], low, high)
    return gradient


def _clamp_min(func: Any, gradient: Any, min: Any) -> Any:
    return _clamp(func, gradient, min, None)


def _clamp_max(func: Any, gradient: Any, max: Any) -> Any:
    return _clamp(func, gradient, None, max)


def _foreach_clamp(func: Any, gradients: Sequence[Any], limit: Any) -> None:
    is_min = func.overloadpacket.__name__ == "_foreach_clamp_min_"
    limits = limit if isinstance(limit, (list, tuple)) else [limit] * len(gradients)
    for gradient, one in zip(gradients, limits, strict=True):
        if isinstance(gradient, ShardedGradient):
            _clamp(func, gradient, *((one, None) if is_min else (None, one)))
        else:
            gradient.clamp_(min=one) if is_min else gradient.clamp_(max=one)


def _zero(func: Any, gradient: ShardedGradient) -> ShardedGradient:
    _to_change(gradient, "zero_")._gradients().zero(gradient._index)
    return gradient


def _foreach_zero(func: Any, gradients: Sequence[Any]) -> None:
    for gradient in gradients:
        gradient.zero_()


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


def _change(func: Any, gradient: Any, *args: Any, **options: Any) -> Any:
    """Applies any pointwise in-place operation to the elements that this rank owns."""
    name = func.overloadpacket.__name__
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
        if not _is_plain(value) or value._index != gradient._index:
            raise gradient._refuse(f"{name} with another sharded gradient")
        return value._gradients().own(value._index)
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


_IS_FINITE = (torch.isfinite, torch.Tensor.isfinite)
_WITHOUT_MEMORY = (
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor.share_memory_,
    torch.Tensor.__array__,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.__deepcopy__,
    torch.Tensor.__dlpack__,
)
_HANDLERS: dict[str, Handler] = {
    "linalg_vector_norm": _vector_norm,
    "norm": lambda func, g, p=2, *rest, **options: _vector_norm(
        func, g, 2 if p is None else p, *rest, **options
    ),
    "_foreach_norm": _foreach_norm,
    "sum": _sum,
    "mean": _mean,
    "var": _var,
    "std": _var,
    "max": _largest,
    "amax": _largest,
    "min": _smallest,
    "amin": _smallest,
    "all": _all,
    "any": _any,
    "abs": _elementwise("absolute value"),
    "square": _elementwise("square"),
    "isnan": _elementwise("is nan", torch.bool),
    "isinf": _elementwise("is infinite", torch.bool),
    "pow": _pow,
    "bitwise_not": _not,
    "logical_not": _not,
    "detach": _alias,
    "alias": _alias,
    "detach_": _itself,
    "_to_copy": _to_copy,
    "zeros_like": _like,
    "ones_like": _like,
    "empty_like": _like,
    "full_like": _like,
    "mul_": _scale,
    "div_": _scale,
    "_foreach_mul_": _foreach_scale,
    "_foreach_div_": _foreach_scale,
    "clamp_": _clamp,
    "clamp_min_": _clamp_min,
    "clamp_max_": _clamp_max,
    "_foreach_clamp_min_": _foreach_clamp,
    "_foreach_clamp_max_": _foreach_clamp,
    "zero_": _zero,
    "_foreach_zero_": _foreach_zero,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
_POINTWISE = frozenset(
    [
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
    ]
)
