"""Stage 2: a step whose gradients are kept, then passes under no_sync(). `.grad` is then what these
passes added on this rank; the sum of the step is kept beside it, divided among the ranks. A change
to `.grad` would not reach that sum, so it is an error on every rank, unless the sum is zero."""

import pytest
import torch
import torch.distributed as dist
from helpers import on_ranks
from shardstep import ZeroRedundancyOptimizer
from test_uneven_passes import Vectors, exchanges, trained


def scale(net: Vectors) -> None:
    for parameter in net.parameters():
        parameter.grad.mul_(0.5)


def replace(net: Vectors) -> None:
    for parameter in net.parameters():
        parameter.grad = parameter.grad * 0.5


def clip(net: Vectors) -> None:
    torch.nn.utils.clip_grad_value_(net.parameters(), 3.5)


def zero_by_module(net: Vectors) -> None:
    net.zero_grad(set_to_none=False)


def drop(net: Vectors) -> None:
    net.zero_grad()


def keep(net: Vectors) -> None:
    pass


@exchanges
@pytest.mark.parametrize("change", [scale, replace, clip, zero_by_module])
@on_ranks(2, timeout=20)
def test_changes_beside_the_sum_of_the_last_step_are_refused(exchange, change):
    net, zero, is_first = trained(exchange)
    net.backward(2.0)
    zero.step()
    with zero.no_sync():
        net.backward(7.0)
    if is_first:  # one rank is enough
        change(net)
    net.backward(3.0)
    with pytest.raises(RuntimeError, match=r"left alone while those of the last step.*of 2\)"):
        zero.step()
    zero.zero_grad()
    net.backward(3.0)
    zero.step()
    net.check(5.0)


@exchanges
@pytest.mark.parametrize(("change", "expected"), [(drop, 3.0), (keep, 12.0)])
@on_ranks(2, timeout=20)
def test_gradients_that_are_kept_or_dropped_whole(exchange, change, expected):
    net, zero, _ = trained(exchange)
    net.backward(2.0)
    zero.step()
    with zero.no_sync():
        net.backward(7.0)
    change(net)
    net.backward(3.0)
    zero.step()
    net.check(2.0 + expected)


@exchanges
@pytest.mark.parametrize("by", ["optimizer", "module"])
@pytest.mark.parametrize("change", [scale, replace, clip])
@on_ranks(2, timeout=20)
def test_changes_beside_a_sum_of_zeros_are_the_plain_ones(exchange, change, by):
    net, zero, _ = trained(exchange)
    net.backward(2.0)
    zero.step()
    (zero if by == "optimizer" else net).zero_grad(set_to_none=False)
    with zero.no_sync():
        net.backward(7.0)
    change(net)
    net.backward(3.0)
    zero.step()
    net.check(2.0 + 3.5 + 3.0)


@exchanges
@pytest.mark.parametrize("before", ["nothing", "a step", "a step, dropped by the module"])
@pytest.mark.parametrize("change", [scale, replace, clip, drop])
@on_ranks(2, timeout=20)
def test_changes_where_there_is_no_sum(exchange, change, before):
    """Reading param_groups, as schedulers and scalers do, shows gradients that are not there."""
    net, zero, _ = trained(exchange)
    if before != "nothing":
        net.backward(2.0)
        zero.step()
        (zero if before == "a step" else net).zero_grad()
    assert len(zero.param_groups) == 1
    with zero.no_sync():
        net.backward(7.0)
    change(net)
    assert len(zero.param_groups) == 1
    net.backward(3.0)
    zero.step()
    net.check((0.0 if before == "nothing" else 2.0) + (3.0 if change is drop else 6.5))


@on_ranks(2, timeout=20)
def test_other_parameters_than_other_ranks():
    """A parameter that was not used in the synchronized pass is looked at too."""
    net = Vectors()
    zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, stage=2, lr=1.0)
    net.backward(2.0)
    zero.step()
    with zero.no_sync():
        net.backward(7.0)
    if dist.get_rank() == 1:
        net.second.grad.mul_(0.5)
    net.first.sum().backward()
    with pytest.raises(RuntimeError, match="got a change to that of parameter 1"):
        zero.step()
