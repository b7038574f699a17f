"""The parts of a module, of param groups and of schedulers that go into a checkpoint, in the form
that the engine takes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardstep._checkpoint_values import (
    with_marked_mappings,
    without_marked_mappings,
    without_numpy,
)

ModuleTensors = list[tuple[str, torch.Tensor, bool]]


def _inner(module: nn.Module) -> nn.Module | None:
    """The module inside a wrapper (DistributedDataParallel, torch.compile); None if not one."""
    if isinstance(module, (DataParallel, DistributedDataParallel)):
        return module.module  # type: ignore[no-any-return]
    if list(module._modules) == ["_orig_mod"]:
        return module._modules["_orig_mod"]
    return None


def _unwrapped(module: nn.Module) -> nn.Module:
    while (inner := _inner(module)) is not None:
        module = inner
    return module


def _root(module: nn.Module) -> nn.Module:
    """The module without wrappers, including wrappers that hold nothing but their `module`."""
    while True:
        module = _unwrapped(module)
        only_wraps = list(module._modules) == ["module"] and not (
            module._parameters or module._buffers
        )
        if not only_wraps or module._modules["module"] is None:
            return module
        module = module._modules["module"]


def named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each module once, under a prefix that does not depend on wrappers."""
    seen: set[nn.Module] = set()

    def walk(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        module = _unwrapped(module)
        if module in seen:
            return
        seen.add(module)
        yield prefix, module
        for name, child in module._modules.items():
            if child is not None:
                yield from walk(f"{prefix}{name}.", child)

    return walk("", _root(module))


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter once, under a name that does not depend on wrappers."""
    seen: set[nn.Parameter] = set()
    for prefix, part in named_modules(module):
        for name, param in part._parameters.items():
            if param is not None and param not in seen:
                seen.add(param)
                yield prefix + name, param


def module_tensors(module: nn.Module | None) -> ModuleTensors:
    """Name, tensor, and whether it is a buffer. Tied tensors have one name."""
    if module is None:
        return []
    for name, value in module.state_dict().items():
        if not isinstance(value, torch.Tensor) and not name.endswith("_extra_state"):
            raise TypeError(
                f"shardstep: cannot save the module's {name}: expected a tensor, got "
                f"{type(value).__qualname__}; save it in `extra`"
            )
    tensors = [(name, param.detach(), False) for name, param in named_parameters(module)]
    seen: set[torch.Tensor] = set()
    for prefix, part in named_modules(module):
        for name, buffer in part._buffers.items():
            if buffer is None or name in part._non_persistent_buffers_set or buffer in seen:
                continue
            seen.add(buffer)
            tensors.append((prefix + name, buffer, True))
    return tensors


def modules_with_extra_state(module: nn.Module | None) -> dict[str, nn.Module]:
    """By the name of the extra state, as in a state_dict()."""
    if module is None:
        return {}
    return {
        f"{prefix}_extra_state": part
        for prefix, part in named_modules(module)
        if type(part).get_extra_state is not nn.Module.get_extra_state
    }


def parameter_names(
    params: Iterable[torch.Tensor], groups: list[dict[str, Any]], module: nn.Module | None
) -> list[str]:
    """By parameter index, from the module or from groups of named parameters."""
    if module is not None:
        by_param: dict[torch.Tensor, str] = {p: name for name, p in named_parameters(module)}
        return [by_param.get(param, "") for param in params]
    if all("param_names" in group for group in groups):
        by_param = {
            param: name
            for group in groups
            for param, name in zip(group["params"], group["param_names"], strict=True)
        }
        return [by_param[param] for param in params]
    return []


_SCHEDULERS = "shardstep.schedulers"  # in `extra`


def listed_schedulers(schedulers: Sequence[Any] | None, method: str) -> list[Any]:
    """The schedulers. Raises TypeError unless each has the method."""
    if schedulers is None:
        return []
    several = isinstance(schedulers, Iterable) and not isinstance(schedulers, (str, Mapping))
    listed = list(schedulers) if several else [schedulers]
    for scheduler in listed:
        if not several or not callable(getattr(scheduler, method, None)):
            got = f"one of {type(scheduler).__name__}" if several else type(schedulers).__name__
            raise TypeError(
                f"shardstep: expected schedulers to be a list of objects with {method}(), got "
                f"{got}; pass schedulers=[scheduler]"
            )
    return listed


def with_schedulers(extra: dict[str, Any] | None, schedulers: list[Any]) -> dict[str, Any] | None:
    """What is saved as `extra`: the user's own part, and the state of schedulers."""
    if extra is not None and not isinstance(extra, dict):
        raise TypeError(f"shardstep: expected extra to be a dict, got {type(extra).__name__}")
    if extra is None and not schedulers:
        return None
    whole = {**(extra or {})}
    if schedulers:
        states = [scheduler.state_dict() for scheduler in schedulers]
        whole[_SCHEDULERS] = with_marked_mappings(states)
    return without_numpy(whole, "extra")  # type: ignore[no-any-return]


def without_schedulers(
    extra: dict[str, Any] | None, schedulers: Sequence[Any], directory: str
) -> tuple[dict[str, Any], list[Any]]:
    """The user's own part of `extra`, and the states for these schedulers."""
    rest = dict(extra or {})
    states = rest.pop(_SCHEDULERS, [])
    if schedulers and len(schedulers) != len(states):
        raise ValueError(
            f"shardstep: expected {len(schedulers)} schedulers in the checkpoint, got "
            f"{len(states)} in {directory}"
        )
    return rest, [without_marked_mappings(state) for state in states[: len(schedulers)]]
