"""Modules wait for their parameters to arrive, so that step() may return while they travel."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from shardstep._sharded_optimizer import ShardedOptimizer


def wait_in_forward(optimizer: ShardedOptimizer, root: torch.nn.Module) -> None:
    """Every module of `root` waits, before its forward, for the parameters that it may read."""
    this = weakref.ref(optimizer)  # the module outlives the optimizer in many programs

    def wait_for(parameters: Iterable[torch.nn.Parameter]) -> None:
        if (zero := this()) is not None:
            indices = [zero._index_of.get(parameter) for parameter in parameters]
            zero.engine.wait_for([index for index in indices if index is not None])

    def wait_for_own(module: torch.nn.Module, _: Any) -> None:
        wait_for(module.parameters(recurse=False))

    def wait_for_whole(module: torch.nn.Module, *_: Any) -> None:
        wait_for(module.parameters())

    def watch(module: torch.nn.Module) -> None:
        if _leaves_parameters_to_children(module):
            module.register_forward_pre_hook(wait_for_own)
            for child in module.children():
                watch(child)
        else:
            module.register_forward_pre_hook(wait_for_whole)

    watch(root)
    root.register_state_dict_pre_hook(wait_for_whole)  # type: ignore[no-untyped-call]


def _leaves_parameters_to_children(module: torch.nn.Module) -> bool:
    """Whether a module's forward leaves its children's parameters to their own forwards.

    torch's own modules may not: attention reads the weight of its projection itself.
    """
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
    if isinstance(module, lists):
        return True
    ours = not type(module).__module__.startswith("torch.")
    return ours and any(isinstance(inner, lists) for inner in module.modules())
