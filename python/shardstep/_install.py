"""Replaces torch's classes with ours, for code that cannot be edited."""

import importlib
from typing import Any

from shardstep import ddp_zero_hook, zero_redundancy_optimizer

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook"
_OURS: list[tuple[str, str, Any]] = [
    (module, "ZeroRedundancyOptimizer", zero_redundancy_optimizer.ZeroRedundancyOptimizer)
    for module in (
        "torch.distributed.optim",
        "torch.distributed.optim.zero_redundancy_optimizer",
        _HOOKS,
    )
] + [(_HOOKS, name, getattr(ddp_zero_hook, name)) for name in ddp_zero_hook.__all__]

_replaced: dict[tuple[str, str], Any] = {}


def install() -> None:
    """Makes torch's names for ZeroRedundancyOptimizer and its hooks refer to ours from here on.

    Names that other modules have already imported do not change.
    """
    for module_name, name, ours in _OURS:
        module = importlib.import_module(module_name)
        _replaced.setdefault((module_name, name), getattr(module, name))
        setattr(module, name, ours)


def uninstall() -> None:
    """Undoes install()."""
    for (module_name, name), theirs in _replaced.items():
        setattr(importlib.import_module(module_name), name, theirs)
    _replaced.clear()
