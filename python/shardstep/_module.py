"""The module that the parameters belong to (`module=`), whose buffers and other parameters the
optimizer keeps the same on all ranks."""

from collections.abc import Iterable
from typing import Any

import torch

from shardstep import _C


def module_to_follow(
    module: torch.nn.Module | None, overlap_forward: bool | torch.nn.Module, stage: int
) -> torch.nn.Module | None:
    """The module that the arguments name. Raises TypeError or ValueError if they do not fit."""
    if isinstance(overlap_forward, torch.nn.Module):
        if module is not None and module is not overlap_forward:
            raise ValueError(
                "shardstep: expected one module, got different ones as overlap_forward and module"
            )
        module = overlap_forward
    elif overlap_forward and module is None:
        raise ValueError("shardstep: expected a module with overlap_forward=True, got none")
    if module is not None and not isinstance(module, torch.nn.Module):
        raise TypeError(f"shardstep: expected module to be a Module, got {type(module).__name__}")
    if module is not None and stage != 2:
        raise ValueError(f"shardstep: expected stage 2 with module, got stage {stage}")
    return module


def describe_module(module: torch.nn.Module | None) -> str:
    """What ranks compare about it."""
    if module is None:
        return ""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return " ".join(f"{name} {t.dtype} {tuple(t.shape)}" for name, t in tensors)


def broadcast(tensors: Iterable[torch.Tensor], group: Any) -> None:
    """Gives rank 0's values to every rank. Collective."""
    _C.broadcast(group, [tensor.detach() for tensor in tensors])
