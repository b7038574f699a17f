"""What people's code does to `optimizer.state` and `optimizer.param_groups` by hand: the plain
optimizer's effect, or an error on every rank."""

import collections
from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks
from shardstep import ZeroRedundancyOptimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

WIDTH = 12

both_stages = pytest.mark.parametrize("stage", [1, 2])
both_shardings = pytest.mark.parametrize("sharding", ["parameter", "element"])


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


def batch(step: int) -> torch.Tensor:
    seed = 10 * step + torch.distributed.get_rank()
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(call: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        call(batch(step).to(next(call.parameters()).dtype)).square().mean().backward()
        optimizer.step()


def groups_of(model: nn.Sequential) -> list[dict]:
    return [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]


def sharded(model: nn.Sequential, stage: int, sharding: str, **options):
    optimizer = ZeroRedundancyOptimizer(
        groups_of(model), torch.optim.Adam, stage=stage, sharding=sharding, lr=1e-2, **options
    )
    return (model if stage == 2 else DistributedDataParallel(model)), optimizer


def assign_nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = collections.defaultdict(dict)


def clear(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def pop_each(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        optimizer.state.pop(parameter, None)


def pop_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.pop(model[0].weight, None)


def forget_momentum(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter in optimizer.state:
            optimizer.state[parameter]["exp_avg"].zero_()


def forget_momentum_of_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "exp_avg" in state:
                state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def move_as_lightning_does(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter, values in optimizer.state.items():
        assert any(parameter is known for known in model.parameters())
        optimizer.state[parameter] = {key: value.clone() for key, value in values.items()}


def look_at_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        _ = optimizer.state[parameter]  # on ranks that do not own it too
    assert len(optimizer.state) == len(list(optimizer.state))


def set_aside(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    before = optimizer.state
    optimizer.state = collections.defaultdict(dict)
    assert len(optimizer.state) == 0
    optimizer.state = before
    assert len(optimizer.state) > 0


CHANGES: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "nothing assigned": assign_nothing,
    "cleared": clear,
    "each popped": pop_each,
    "one popped": pop_one,
    "momentum zeroed": forget_momentum,
    "momentum replaced": forget_momentum_of_all,
    "moved": move_as_lightning_does,
    "looked at": look_at_all,
    "set aside": set_aside,
}


def compare(stage, sharding):
    for name, change in CHANGES.items():
        model, plain = net(), net()
        call, zero = sharded(model, stage, sharding)
        ddp = DistributedDataParallel(plain)
        optimizer = torch.optim.Adam(groups_of(plain), lr=1e-2)
        for one, its_call, its_optimizer in ((model, call, zero), (plain, ddp, optimizer)):
            train(its_call, its_optimizer, 3)
            change(one, its_optimizer)
            train(its_call, its_optimizer, 3)
        torch.testing.assert_close(
            parameters_to_vector(model.parameters()),
            parameters_to_vector(plain.parameters()),
            rtol=1e-5,
            atol=1e-6,  # DDP adds in another order, and Adam magnifies that while moments are small
            msg=lambda message, name=name: f"{name}: {message}",
        )
        zero.consolidate_state_dict(to=0)  # nothing is left over in the state


@both_stages
@both_shardings
def test_state_that_is_changed_by_hand(stage, sharding):
    run_ranks(2, compare, stage, sharding)


def finds_state_of_masters():
    model = net().bfloat16()
    call, zero = sharded(model, 2, "parameter", master_dtype=torch.float32)
    train(call, zero, 2)
    found = [parameter for parameter in model.parameters() if parameter in zero.state]
    assert len(found) == len(zero.state) > 0
    assert all(zero.state[p]["exp_avg"].dtype == torch.float32 for p in found)


def test_state_of_masters_is_found_by_parameter():
    run_ranks(2, finds_state_of_masters)


def refuses_whole_state():
    model = net()
    call, zero = sharded(model, 2, "element")
    train(call, zero, 1)
    whole = {p: {"exp_avg": torch.zeros_like(p)} for p in model.parameters()}
    for assign in (lambda: zero.state.update(whole), lambda: setattr(zero, "state", whole)):
        with pytest.raises(ValueError, match=r"'exp_avg'.*load_state_dict\(\).*\(rank"):
            assign()
    train(call, zero, 1)


def test_whole_state_is_refused_by_element():
    run_ranks(2, refuses_whole_state)


def shrink(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]


def swap(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].reverse()


REFUSED: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "last group popped": lambda optimizer: optimizer.param_groups.pop(),
    "first group popped": lambda optimizer: optimizer.param_groups.pop(0),
    "other list": shrink,
    "popped": lambda optimizer: optimizer.param_groups[0]["params"].pop(),
    "appended": lambda optimizer: optimizer.param_groups[0]["params"].append(torch.ones(2)),
    "other order": swap,
}


def refuses_groups(stage, sharding, on_one_rank):
    for change in REFUSED.values():
        call, zero = sharded(net(), stage, sharding)
        train(call, zero, 2)
        if not on_one_rank or torch.distributed.get_rank() == 1:
            change(zero)
        with pytest.raises((ValueError, RuntimeError), match=r"to keep the param.*new optimizer"):
            train(call, zero, 1)


@both_stages
@both_shardings
@pytest.mark.parametrize("on_one_rank", [False, True])
def test_groups_whose_parameters_are_changed_by_hand_are_an_error(stage, sharding, on_one_rank):
    run_ranks(2, refuses_groups, stage, sharding, on_one_rank)
