"""Loading a state costs as much per parameter whether there are many or few."""

import sys

import pytest
import torch
from helpers import on_ranks
from shardstep import ZeroRedundancyOptimizer
from torch import nn


def python_calls(function) -> int:
    """How many Python and C functions it calls, and lines of comprehensions it runs."""
    count = 0

    def see(frame, event, _):
        nonlocal count
        count += 1
        return see

    sys.settrace(see)
    try:
        function()
    finally:
        sys.settrace(None)
    return count


def optimizer(count, **options):
    params = [nn.Parameter(torch.zeros(2)) for _ in range(count)]
    return ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=0.1, **options)


def state_dict(zero):
    count = len(zero.param_groups[0]["params"])
    ones = torch.ones(2)
    state = {
        i: {"step": torch.tensor(1.0), "exp_avg": ones, "exp_avg_sq": ones} for i in range(count)
    }
    plain = torch.optim.Adam([nn.Parameter(ones) for _ in range(count)])
    return {"state": state, "param_groups": plain.state_dict()["param_groups"]}


@pytest.mark.parametrize("options", [{}, {"sharding": "element"}], ids=["parameter", "element"])
@on_ranks(1, 2, timeout=120)
def test_load_state_dict_is_linear(options):
    counts = []
    for size in (300, 1200):
        zero = optimizer(size, **options)
        state = state_dict(zero)
        counts.append(python_calls(lambda zero=zero, state=state: zero.load_state_dict(state)))
    assert counts[1] < 5 * counts[0], counts
