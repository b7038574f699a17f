"""install() replaces torch's class with ours, uninstall() restores torch's."""

import importlib

import torch
import torch.distributed as dist
from helpers import (
    assert_bitwise,
    assert_same_on_all_ranks,
    backward,
    batches,
    ddp_net,
    on_ranks,
    ours,
    train,
)

pytestmark = ours

HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook"
PLACES = [
    ("torch.distributed.optim", "ZeroRedundancyOptimizer"),
    ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"),
    (HOOKS, "hook_with_zero_step"),
    (HOOKS, "hook_with_zero_step_interleaved"),
]


def in_place():
    return [getattr(importlib.import_module(module), name) for module, name in PLACES]


def test_install_and_uninstall():
    import shardstep
    from shardstep import ddp_zero_hook

    mine = [
        shardstep.ZeroRedundancyOptimizer,
        shardstep.ZeroRedundancyOptimizer,
        ddp_zero_hook.hook_with_zero_step,
        ddp_zero_hook.hook_with_zero_step_interleaved,
    ]
    torchs = in_place()
    assert not any(a is b for a, b in zip(mine, torchs, strict=True))
    shardstep.uninstall()  # not installed: nothing happens
    assert in_place() == torchs
    try:
        for _ in range(2):  # once or twice is the same
            shardstep.install()
            assert in_place() == mine
    finally:
        shardstep.uninstall()
    assert in_place() == torchs
    shardstep.uninstall()
    assert in_place() == torchs
    try:
        shardstep.install()
        assert in_place() == mine
    finally:
        shardstep.uninstall()
    assert in_place() == torchs


def script():
    """A script that knows only torch: torch's imports, DDP, overlap."""
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    plain, overlapped = ddp_net(), ddp_net()
    zero = ZeroRedundancyOptimizer(plain.parameters(), torch.optim.Adam, lr=0.05)
    overlapping = ZeroRedundancyOptimizer(
        overlapped.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.05
    )
    overlapped.register_comm_hook(
        None, hook_with_zero_step(allreduce_hook, overlapped, overlapping)
    )
    for batch in batches(3):
        train(plain, zero, batch)
        overlapping.zero_grad()
        backward(overlapped, batch)
    assert isinstance(zero, ZeroRedundancyOptimizer)
    assert isinstance(zero, dist.optim.ZeroRedundancyOptimizer)
    assert_bitwise(plain.parameters(), overlapped.parameters())
    assert_same_on_all_ranks(plain.parameters())
    return zero


@on_ranks(2)
def test_a_script_with_torchs_imports_gets_ours():
    import shardstep

    shardstep.install()
    assert type(script()) is shardstep.ZeroRedundancyOptimizer


@on_ranks(2)
def test_ours_is_torchs_while_installed_and_after():
    """isinstance still holds for optimizers that were made before, between and after."""
    import shardstep
    from torch.distributed.optim import ZeroRedundancyOptimizer as Torchs

    def make():
        parameters = [torch.nn.Parameter(torch.ones(3))]
        return shardstep.ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)

    before = make()
    shardstep.install()
    between = make()
    for zero in (before, between):
        assert isinstance(zero, dist.optim.ZeroRedundancyOptimizer)
        assert isinstance(zero, Torchs)
    shardstep.uninstall()
    for zero in (before, between, make()):
        assert isinstance(zero, dist.optim.ZeroRedundancyOptimizer)
