"""What of a module, of torch's generators and of param groups goes into a checkpoint, in the form
that the engine takes."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ModuleTensors = list[tuple[str, torch.Tensor, bool]]


def module_tensors(module: nn.Module | None) -> ModuleTensors:
    """Name, tensor, and whether it is a buffer. Tied tensors have one name; DDP adds none."""
    if module is None:
        return []
    while isinstance(module, DistributedDataParallel):
        module = module.module
    kept = module.state_dict()
    for name, value in kept.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"shardstep: cannot save the module's {name}: expected a tensor, got "
                f"{type(value).__qualname__}; save it in `extra`"
            )
    tensors = [(name, param.detach(), False) for name, param in module.named_parameters()]
    tensors += [(name, buffer, True) for name, buffer in module.named_buffers() if name in kept]
    return tensors


def parameter_names(
    params: Iterable[torch.Tensor], groups: list[dict[str, Any]], module: nn.Module | None
) -> list[str]:
    """By parameter index, from the module or from groups that were made of named parameters."""
    if module is not None:
        while isinstance(module, DistributedDataParallel):
            module = module.module
        by_param = {param: name for name, param in module.named_parameters()}
        return [by_param.get(param, "") for param in params]
    if all("param_names" in group for group in groups):
        by_param = {
            param: name
            for group in groups
            for param, name in zip(group["params"], group["param_names"], strict=True)
        }
        return [by_param[param] for param in params]
    return []


def rng_states() -> dict[str, torch.Tensor]:
    """Of the generators that torch's functions use unless told otherwise."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_states(states: dict[str, torch.Tensor]) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
