"""Optimizer state as torch.distributed.checkpoint saves and loads it, each rank its own part.

A state tensor with one element per element of its parameter becomes a flat tensor in memory order,
of which each rank has a range, in either sharding. So DCP can load it at a different world size and
sharding.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardstep._C import LocalParam
from shardstep._group_settings import GroupSettings
from shardstep._param_groups import options_of
from shardstep._tensors import is_plain

_aten = torch.ops.aten
_COPIES = (_aten.zeros_like.default, _aten.detach.default, _aten._to_copy.default)


@dataclasses.dataclass(frozen=True)
class _Part:
    """A block of a tensor, and how the local optimizer sees it."""

    whole: tuple[int, ...]
    begin: tuple[int, ...]
    sizes: tuple[int, ...]
    local_shape: tuple[int, ...]
    local_stride: tuple[int, ...]


def _part_of_param(local: LocalParam, param: torch.Tensor, like: torch.Tensor) -> _Part:
    """What this rank owns of a tensor with one element per element of the parameter."""
    numel = (like.numel(),)
    return _Part((param.numel(),), (local.begin,), numel, tuple(like.shape), like.stride())


def _all_of(tensor: torch.Tensor) -> _Part:
    """A tensor with its own axes. A 0-d tensor counts as one of one element."""
    shape = tuple(tensor.shape) or (1,)
    return _Part(shape, (0,) * len(shape), shape, tuple(tensor.shape), tensor.stride())


class ShardedState(torch.Tensor):
    """A state tensor of which this rank has a part, in the form that DCP's planners need.

    `elements` is None while there is no such state. Saving records that; loading creates it first.
    """

    part: _Part
    elements: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        part: _Part,
        elements: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "ShardedState":
        state: ShardedState = torch.Tensor._make_wrapper_subclass(
            cls, part.whole, dtype=dtype, device=device
        )
        state.part, state.elements = part, elements
        return state

    def local(self) -> torch.Tensor | None:
        """The part, as the local optimizer sees it."""
        if self.elements is None:
            return None
        return self.elements.as_strided(self.part.local_shape, self.part.local_stride)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedState({self.part}, {self.elements})"

    # -- DCP's planners call these -----------------------------------------------------------------

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.part.begin), torch.Size(self.part.sizes))

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        if self.elements is None:
            return [WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)]
        properties = TensorProperties.create_from_tensor(self.elements)
        chunk = self._chunk()
        data = TensorWriteData(chunk=chunk, properties=properties, size=self.size())
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if self.elements is None:
            self.elements = torch.empty(self.part.sizes, dtype=self.dtype, device=self.device)
        return [self._chunk()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor | None:
        return self.elements

    # -- and its stagers these, to make a copy -----------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        state, kwargs = args[0], kwargs or {}
        if func is _aten.copy_.default and isinstance(args[1], ShardedState):
            if args[1].elements is not None:
                state.elements.copy_(args[1].elements)
            return state
        if func in _COPIES or func is _aten.new_empty.default:
            elements = state.elements if func in _COPIES else None
            if elements is not None:
                elements = func(elements, **kwargs)
            device = kwargs.get("device") or state.device
            return ShardedState(state.part, elements, state.dtype, device)
        raise NotImplementedError(
            "shardstep: expected a sharded state to be used only by torch.distributed.checkpoint, "
            f"got {func}"
        )


def _is_divided(name: str, tensor: torch.Tensor, owned: torch.Tensor) -> bool:
    """Whether a state tensor has one element per owned element. A step counter never has."""
    return name != "step" and tensor.shape == owned.shape


def _in_order_of(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with the strides of `like`: itself if it has them already, else a copy."""
    if tensor.shape != like.shape or tensor.stride() == like.stride():
        return tensor
    options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
    return torch.empty_strided(like.shape, like.stride(), **options).copy_(tensor)


@dataclasses.dataclass(frozen=True)
class Carried:
    """A value that DCP saves and loads as one object, whatever it contains."""

    value: Any


def _map_leaves(value: Any, name: str, leaf: Callable[[str, Any], Any]) -> Any:
    """Applies `leaf` to what DCP treats as single values: it descends into dicts and lists."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _map_leaves(item, key, leaf) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_leaves(item, name, leaf) for item in value]
    return leaf(name, value)


def shard_values(
    local: LocalParam, param: torch.Tensor, values: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of what this rank owns of a parameter. Nothing is copied."""

    def shard(name: str, value: Any) -> Any:
        if isinstance(value, (torch.Tensor, Mapping)) and not is_plain(value):
            return Carried(value)
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach()
        if _is_divided(name, value, local.tensor):
            value = _in_order_of(local.tensor, value)
            part = _part_of_param(local, param, value)
            elements = value.as_strided((value.numel(),), (1,))
        else:
            value = value.contiguous()
            part = _all_of(value)
            elements = value.view(part.sizes)
        return ShardedState(part, elements, value.dtype, value.device)

    sharded: dict[str, Any] = _map_leaves(dict(values), "", shard)
    return sharded


def loaded_values(values: dict[str, Any]) -> dict[str, Any] | None:
    """What DCP has loaded into a dict of shard_values or StateTemplates; None if nothing."""
    found = False

    def load(_: str, value: Any) -> Any:
        nonlocal found
        if isinstance(value, ShardedState):
            value = value.local()
        elif isinstance(value, Carried):
            value = value.value
        found = found or value is not None
        return value

    loaded: dict[str, Any] = _map_leaves(values, "", load)
    return loaded if found else None


@dataclasses.dataclass(frozen=True)
class StateTemplates:
    """What an optimizer's state will look like, learned from steps on throw-away parameters."""

    settings: list[GroupSettings]
    groups: list[dict[str, Any]]
    _known: dict[Any, tuple[torch.Tensor, dict[str, Any]]] = dataclasses.field(default_factory=dict)

    def names(self, local: LocalParam, group: int) -> set[str]:
        return set(self._after_a_step(local, group)[1])

    def values(self, local: LocalParam, param: torch.Tensor, group: int) -> dict[str, Any]:
        """Like shard_values, for state that does not exist yet."""
        scratch, values = self._after_a_step(local, group)

        def shard(name: str, value: Any) -> Any:
            if not is_plain(value):
                return None
            part = _all_of(value)
            if _is_divided(name, value, scratch):
                part = _part_of_param(local, param, local.tensor)
            return ShardedState(part, None, value.dtype, value.device)

        sharded: dict[str, Any] = _map_leaves(values, "", shard)
        return sharded

    def _after_a_step(self, local: LocalParam, group: int) -> tuple[torch.Tensor, dict[str, Any]]:
        # An element-wise optimizer's state looks the same for any number of elements as for two.
        settings = self.settings[group]
        shape = torch.Size((2,)) if settings.sharding == "element" else local.tensor.shape
        key = (group, shape, local.tensor.dtype, local.tensor.device)
        if key not in self._known:
            options = options_of(self.groups[group])
            scratch = torch.zeros(shape, dtype=local.tensor.dtype, device=local.tensor.device)
            scratch.requires_grad_().grad = torch.zeros_like(scratch)
            optimizer = settings.make([{**options, "params": [scratch]}])
            optimizer.step()
            # What it keeps may differ from what its state_dict() returns.
            self._known[key] = scratch, dict(optimizer.state_dict()["state"].get(0, {}))
        return self._known[key]
