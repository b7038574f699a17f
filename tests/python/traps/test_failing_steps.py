"""An update that raises on one rank is an error on every rank, in that step, and nothing hangs."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from shardstep import ZeroRedundancyOptimizer
from shardstep.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

EXCHANGES = ["native", "pairwise", "shared_memory"]


class Picky(torch.optim.SGD):
    refuses = False

    def step(self, closure=None):
        if Picky.refuses:
            raise KeyError("not today")
        return super().step(closure)


class Twice(torch.optim.SGD):
    """Looks at the loss twice in a step."""

    def step(self, closure=None):
        closure()
        super().step()
        return closure()


def make_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 2))


def batch():
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(4, 6, generator=generator)


def same_everywhere(net):
    for param in net.parameters():
        first = param.detach().clone()
        dist.broadcast(first, 0)
        if not torch.equal(first, param):
            return False
    return True


def fails_on_rank_1(step, hear):
    """`step` raises on rank 1; the others raise there, or in `hear`, which comes next."""
    Picky.refuses = dist.get_rank() == 1
    if dist.get_rank() == 1:
        with pytest.raises(KeyError, match="not today"):
            step()
    else:
        with pytest.raises(RuntimeError, match=r"rank 1 failed .*KeyError.*not today.* \(rank"):
            step()
            hear()
    Picky.refuses = False


def update_raises(options):
    net = make_net()
    if options.get("overlap_forward"):
        options = {**options, "module": net}
    zero = ZeroRedundancyOptimizer(net.parameters(), Picky, lr=0.1, elementwise=True, **options)

    def step():
        zero.zero_grad()
        net(batch()).square().sum().backward()
        zero.step()

    step()
    fails_on_rank_1(step, lambda: net(batch()))
    step()
    zero.wait()
    assert options.get("stage") != 2 or same_everywhere(net)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("sharding", ["parameter", "element"])
@pytest.mark.parametrize("stage", [1, 2])
def test_an_update_that_raises_on_one_rank_is_an_error_on_all(stage, sharding, exchange):
    options = {"stage": stage, "sharding": sharding, "exchange": exchange}
    run_ranks(3, update_raises, options, timeout=40)


@pytest.mark.parametrize(
    "options",
    [{"share_parameters": True}]
    + [{"overlap_forward": True, "exchange": exchange} for exchange in EXCHANGES],
    ids=str,
)
def test_with_options_of_stage_2(options):
    run_ranks(2, update_raises, {"stage": 2, **options}, timeout=40)


def closure_raises(stage):
    net = make_net()
    zero = ZeroRedundancyOptimizer(net.parameters(), Twice, lr=0.1, stage=stage)
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        if calls == 2 and dist.get_rank() == 1:
            raise KeyError("once is enough")
        zero.zero_grad()
        loss = net(batch()).square().sum()
        loss.backward()
        return loss

    with pytest.raises(KeyError if dist.get_rank() == 1 else RuntimeError, match="once is enough"):
        zero.step(closure)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_second_closure_that_raises_on_one_rank_is_an_error_on_all(stage):
    run_ranks(2, closure_raises, stage, timeout=40)


HOOKS = {"after": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}


def update_in_backward_raises(hook, exchange):
    ddp = DistributedDataParallel(make_net(), bucket_cap_mb=0.0001)
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), Picky, overlap_with_ddp=True, exchange=exchange, lr=0.1
    )
    ddp.register_comm_hook(None, HOOKS[hook](allreduce_hook, ddp, zero))

    def step():
        ddp(batch()).square().sum().backward()

    step()
    fails_on_rank_1(step, lambda: None)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("hook", HOOKS)
def test_an_update_inside_the_backward_pass_that_raises_on_one_rank(hook, exchange):
    run_ranks(2, update_in_backward_raises, hook, exchange, timeout=40)


def frozen_on_one_rank(hook, exchange):
    ddp = DistributedDataParallel(make_net(), find_unused_parameters=True)
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, exchange=exchange, lr=0.1
    )
    ddp.register_comm_hook(None, HOOKS[hook](allreduce_hook, ddp, zero))
    ddp(batch()).square().sum().backward()
    if dist.get_rank() == 1:
        ddp.module[1].bias.requires_grad_(False)
    with pytest.raises(ValueError, match="expected the same parameters on every rank"):
        ddp(batch()).square().sum().backward()


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("hook", HOOKS)
def test_ranks_compare_parameters_that_are_updated_inside_the_backward_pass(hook, exchange):
    run_ranks(2, frozen_on_one_rank, hook, exchange, timeout=40)
