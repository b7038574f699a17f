"""Modules wait for their parameters to arrive, so that step() may return while they travel."""

import weakref
from typing import Any

import torch

from shardstep._sharded_optimizer import ShardedOptimizer


class _WaitForParameters:
    """A hook of a module: waits for its own parameters, or for those inside it too."""

    def __init__(self, optimizer: ShardedOptimizer | None, recurse: bool) -> None:
        # The module outlives the optimizer in many programs.
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._recurse = recurse

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is not None:
            indices = map(optimizer._index_of.get, module.parameters(self._recurse))
            optimizer.engine.wait_for([index for index in indices if index is not None])

    def __reduce__(self) -> Any:
        """A copy of the module has parameters that nobody sends."""
        return _WaitForParameters, (None, self._recurse)


def wait_in_forward(optimizer: ShardedOptimizer, root: torch.nn.Module) -> None:
    """Every module of `root` waits, before its forward, for the parameters that it may read."""
    wait_for_own = _WaitForParameters(optimizer, recurse=False)
    wait_for_whole = _WaitForParameters(optimizer, recurse=True)

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
