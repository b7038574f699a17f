"""What users hand over as `params`, as param groups."""

from collections.abc import Iterable
from typing import Any

import torch

ParamGroup = dict[str, Any]


def parse_param_groups(params: Any) -> list[ParamGroup]:
    """The groups that `params` stands for. Raises TypeError or ValueError if it stands for none."""
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise TypeError(
            "shardstep: expected params to be an iterable of tensors or of param groups, "
            f"got {type(params).__name__}"
        )
    items = list(params)
    if not items:
        raise ValueError("shardstep: expected parameters to optimize, got none")
    if all(isinstance(item, torch.Tensor) for item in items):
        return [{"params": items}]
    for item in items:
        if not isinstance(item, dict):
            raise TypeError(
                "shardstep: expected params to be all tensors or all param groups, "
                f"got {type(item).__name__} among them"
            )
    return [parse_param_group(item) for item in items]


def parse_param_group(group: Any) -> ParamGroup:
    """A copy of the group, whose 'params' is a list."""
    if not isinstance(group, dict):
        raise TypeError(f"shardstep: expected a param group, a dict, got {type(group).__name__}")
    if "params" not in group:
        raise ValueError(f"shardstep: expected a param group with 'params', got {list(group)}")
    params = group["params"]
    if isinstance(params, torch.Tensor):
        params = [params]
    elif isinstance(params, set):
        raise TypeError("shardstep: expected the parameters of a group in an order, got a set")
    return {**group, "params": list(params)}


def options_of(group: ParamGroup) -> ParamGroup:
    """All of a group but its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def describe(optimizer_class: Any, group: ParamGroup) -> str:
    """What ranks compare of a group besides its parameters."""
    options = " ".join(f"{k}={_in_words(v)}" for k, v in sorted(options_of(group).items()))
    return f"{getattr(optimizer_class, '__qualname__', optimizer_class)} {options}"


def _in_words(value: Any) -> str:
    """The same on every rank if the value is."""
    if isinstance(value, torch.Tensor):
        return f"tensor {value.tolist()}" if value.numel() <= 8 else f"tensor {value.shape}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_in_words, value))})"
    simple = isinstance(value, (bool, int, float, complex, str, type(None), torch.dtype))
    return repr(value) if simple else type(value).__qualname__
