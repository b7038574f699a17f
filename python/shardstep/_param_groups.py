"""Parses what users pass as `params` into param groups."""

import functools
from collections.abc import Collection, Iterable
from typing import Any

import torch

from shardstep._tensors import has_memory_of_its_own

ParamGroup = dict[str, Any]


def parse_param_groups(params: Any, own_options: Collection[str]) -> list[ParamGroup]:
    """The groups in `params`. Raises TypeError or ValueError if there are none.

    `own_options` are not options of a group.
    """
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise TypeError(
            "shardstep: expected params to be an iterable of tensors, of named tensors or of param "
            f"groups, got {type(params).__name__}"
        )
    items = list(params)
    if not items:
        raise ValueError("shardstep: expected parameters to optimize, got none")
    if all(isinstance(item, torch.Tensor) or _is_named(item) for item in items):
        items = [{"params": items}]
    for item in items:
        if not isinstance(item, dict):
            raise TypeError(
                "shardstep: expected params to be all tensors, all (name, tensor) or all param "
                f"groups, got {type(item).__name__} among them"
            )
    return [parse_param_group(item, number, own_options) for number, item in enumerate(items)]


def parse_param_group(group: Any, number: int, own_options: Collection[str]) -> ParamGroup:
    """A copy of the group that will have this number, with its parameters checked and in a list."""
    if not isinstance(group, dict):
        raise TypeError(f"shardstep: expected a param group, a dict, got {type(group).__name__}")
    if "params" not in group:
        raise ValueError(f"shardstep: expected a param group with 'params', got {list(group)}")
    for key in group:
        if key in own_options:
            raise ValueError(
                "shardstep: expected options of the local optimizer, got "
                f"'{key}' in param group {number}, where it has no effect; pass it to "
                "ZeroRedundancyOptimizer instead"
            )
    params = group["params"]
    if isinstance(params, torch.Tensor):
        params = [params]
    elif isinstance(params, set):
        raise TypeError(
            "shardstep: expected the parameters of a group in a fixed order, got a set; pass a list"
        )
    params = list(params)
    for position, item in enumerate(params):
        _check_parameter(item, position, number)
    return {**group, "params": params}


def _is_named(item: Any) -> bool:
    return (
        isinstance(item, tuple)
        and len(item) == 2
        and isinstance(item[0], str)
        and isinstance(item[1], torch.Tensor)
    )


def _check_parameter(item: Any, position: int, group: int) -> None:
    if not isinstance(item, torch.Tensor) and not _is_named(item):
        raise TypeError(
            f"shardstep: expected parameter {position} of param group {group} to be a tensor or "
            f"(name, tensor), got {type(item).__name__}"
        )
    name, tensor = item if isinstance(item, tuple) else ("", item)
    if not has_memory_of_its_own(tensor):
        raise TypeError(
            f"shardstep: expected parameter {position}{f' ({name})' if name else ''} of param "
            f"group {group} to be a tensor with memory of its own, got {type(tensor).__name__}; "
            "shard a model either with such tensors or with this optimizer"
        )


def options_of(group: ParamGroup) -> ParamGroup:
    """A group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def unwrapped(optimizer_class: Any) -> tuple[Any, dict[str, Any]]:
    """The callable inside functools.partial, and the arguments that it adds."""
    arguments: dict[str, Any] = {}
    while isinstance(optimizer_class, functools.partial):
        arguments = {**optimizer_class.keywords, **arguments}
        optimizer_class = optimizer_class.func
    return optimizer_class, arguments


def name_of(optimizer_class: Any) -> str:
    """The name of a class or function; for a callable object, the name of its class."""
    name: str = getattr(optimizer_class, "__name__", type(optimizer_class).__name__)
    return name


def describe(optimizer_class: Any, group: ParamGroup) -> str:
    """What ranks compare about a group besides its parameters."""
    cls, arguments = unwrapped(optimizer_class)
    options = sorted({**arguments, **options_of(group)}.items())
    return " ".join([name_of(cls), *(f"{key}={_in_words(value)}" for key, value in options)])


def _in_words(value: Any) -> str:
    """A description that is the same on every rank if the value is."""
    if isinstance(value, torch.Tensor):
        return f"tensor {value.tolist()}" if value.numel() <= 8 else f"tensor {value.shape}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_in_words, value))})"
    simple = isinstance(value, (bool, int, float, complex, str, type(None), torch.dtype))
    return repr(value) if simple else type(value).__qualname__
