"""The `p.grad` of stage 2, when the gradient is divided among the ranks: a tensor without memory
that answers as the whole gradient would.

What it answers stands in _gradient_answers.py, what may be done to it in _gradient_changes.py; both
register their functions with `handles`. Everything else is refused.
"""

import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from shardstep._C import ShardedGradients

Handler = Callable[..., Any]
_AnyHandler = TypeVar("_AnyHandler", bound=Handler)

_HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[_AnyHandler], _AnyHandler]:
    """Makes a function the implementation of these of ATen's operations."""

    def register(handler: _AnyHandler) -> _AnyHandler:
        _HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


class Owner(Protocol):
    """What a gradient needs of its optimizer."""

    @property
    def _sharded_gradients(self) -> ShardedGradients: ...

    @property
    def _own_gradients(self) -> ShardedGradients: ...

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
        if func == _SET_DATA:
            return _set_data(*args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        kwargs = dict(kwargs or {})
        if isinstance(out := kwargs.pop("out", None), cls):
            return _write_to(out, name, args, kwargs)
        handler = _HANDLERS.get(name) if out is None else None
        if handler is None:
            raise first_of((*args, *kwargs.values()))._refuse(name)
        return handler(func, *args, **kwargs)

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

    def is_same_gradient(self, other: "ShardedGradient") -> bool:
        """Whether both are the gradient of the same parameter of the same optimizer."""
        return (
            self._owner() is other._owner()
            and self._index == other._index
            and self._kind == other._kind == "gradient"
        )

    def is_alias_of(self, other: "ShardedGradient") -> bool:
        """The same, in the same dtype."""
        return self.is_same_gradient(other) and self.dtype == other.dtype

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


def first_of(args: Any) -> Any:
    """The first sharded gradient among some arguments."""
    for arg in args:
        if isinstance(arg, ShardedGradient):
            return arg
        if isinstance(arg, (list, tuple)) and (found := first_of(arg)) is not None:
            return found
    return None


def is_plain(gradient: Any) -> bool:
    """Whether this is the gradient itself, in any dtype."""
    return isinstance(gradient, ShardedGradient) and gradient._kind == "gradient"


def _set_data(tensor: ShardedGradient, data: torch.Tensor) -> None:
    """`p.grad.data = data`, which older code writes for a change in place."""
    if isinstance(data, ShardedGradient) and tensor.is_same_gradient(data):
        return  # model.to() and the like; the parameter's dtype is checked where it is used
    parameter = tensor._parameter()
    if parameter is None or parameter.grad is not tensor:
        raise tensor._refuse("other data for an alias")
    if data.shape != tensor.shape or data.dtype != tensor.dtype or data.device != tensor.device:
        raise tensor._refuse("another size, dtype or device")
    with torch.no_grad():
        tensor.copy_(data)


def _write_to(out: ShardedGradient, name: str, args: Any, options: dict[str, Any]) -> Any:
    """`torch.mul(p.grad, 2, out=p.grad)` and the like are changes in place."""
    change = getattr(out, f"{name}_", None)
    first = args[0] if args else None
    if change is None or not isinstance(first, ShardedGradient) or not out.is_alias_of(first):
        raise out._refuse(f"{name} with out=")
    return change(*args[1:], **options)


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
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
    torch.Tensor.__dlpack_device__,
)
