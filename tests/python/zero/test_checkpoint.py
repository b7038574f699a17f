"""Sharded checkpoints: saved at one world size and sharding, loaded at any other."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import (
    assert_bitwise,
    assert_same,
    everywhere,
    groups_over,
    make_parameters,
    set_gradients,
)
from implementation import ZeroRedundancyOptimizer
from ranks import run_ranks
from shardstep._C import Checkpoint
from torch import nn

pytestmark = pytest.mark.ours

SHAPES = (9, (3, 5), 7, (2, 2), 40, (), (1,), (0, 3), (4, 3, 2, 2))
GROUPS = [{"count": 2, "lr": 0.3}, {"count": 7, "weight_decay": 0.1}]
OPTIMIZERS = {
    "adamw-fused": (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    "adam": (torch.optim.Adam, {}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd-stateless": (torch.optim.SGD, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "nadam": (torch.optim.NAdam, {}),
}


def parameters():
    """Even, odd, empty, without axes, and one that lies in memory channels-last."""
    made = make_parameters(*SHAPES)
    made[8] = nn.Parameter(made[8].detach().contiguous(memory_format=torch.channels_last))
    return made


def make_zero(name, options, made=None):
    optimizer_class, defaults = OPTIMIZERS[name]
    made = parameters() if made is None else made
    groups = groups_over(made, GROUPS)
    return made, ZeroRedundancyOptimizer(
        groups, optimizer_class, **options, **{"lr": 0.1, **defaults}
    )


def train(zero, made, steps):
    for step in steps:
        set_gradients(made, step)
        made[8].grad = torch.empty_like(made[8]).copy_(made[8].grad)  # as autograd lays it out
        if step % 2 == 1:
            made[1].grad = None  # a step counter of its own
        zero.step()


def save_all(folder, options):
    """For each optimizer, a checkpoint after two steps, and the parameters after four."""
    results = {}
    for name in OPTIMIZERS:
        made, zero = make_zero(name, options)
        train(zero, made, range(2))
        at = [p.detach().clone() for p in made]
        state = everywhere(zero)
        zero.save_checkpoint(Path(folder) / name)
        train(zero, made, range(2, 4))
        results[name] = (at, [p.detach().clone() for p in made], state)
    if dist.get_rank() == 0:
        torch.save(results, Path(folder) / "expected.pt")


def load_all(folder, options):
    for name, (at, after, state) in torch.load(Path(folder) / "expected.pt").items():
        made = parameters()
        for param, value in zip(made, at, strict=True):
            param.data.copy_(value)
        made, zero = make_zero(name, options, made)
        zero.param_groups[0]["lr"] = 77.0
        zero.load_checkpoint(Path(folder) / name)
        assert zero.param_groups[0]["lr"] == 0.3
        assert_same(everywhere(zero), state)
        train(zero, made, range(2, 4))
        assert_bitwise(made, after)


ELEMENT, PARAMETER = {"sharding": "element"}, {}


@pytest.mark.parametrize(
    "saved, loaded",
    [
        ((4, ELEMENT), (3, PARAMETER)),
        ((2, PARAMETER), (3, ELEMENT)),
        ((3, ELEMENT), (2, ELEMENT)),
        ((1, PARAMETER), (2, ELEMENT)),
        ((2, ELEMENT), (1, PARAMETER)),
        ((2, PARAMETER), (2, PARAMETER)),
    ],
    ids=lambda side: f"{side[0]}-{side[1].get('sharding', 'parameter')}",
)
def test_any_world_size_and_sharding(tmp_path, saved, loaded):
    run_ranks(saved[0], save_all, str(tmp_path), saved[1])
    run_ranks(loaded[0], load_all, str(tmp_path), loaded[1])


def test_the_plain_optimizer_loads_it(tmp_path):
    run_ranks(3, save_all, str(tmp_path), ELEMENT)
    for name, (at, after, state) in torch.load(tmp_path / "expected.pt").items():
        optimizer_class, defaults = OPTIMIZERS[name]
        made = parameters()
        for param, value in zip(made, at, strict=True):
            param.data.copy_(value)
        plain = optimizer_class(groups_over(made, GROUPS), **{"lr": 0.1, **defaults})
        read = Checkpoint(str(tmp_path / name)).state_dict()
        assert_same(read, state)
        assert (
            read["state"]
            .get(8, {})
            .get("exp_avg", made[8])
            .is_contiguous(memory_format=torch.channels_last)
        )
        plain.load_state_dict(read)
        train(plain, made, range(2, 4))
        assert_bitwise(made, after)
