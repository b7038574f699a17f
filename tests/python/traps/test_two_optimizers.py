"""Two optimizers over the same parameters: in stage 2 each would reduce what the other left."""

import pytest
import torch
from helpers import on_ranks
from shardstep import ZeroRedundancyOptimizer
from test_uneven_passes import exchanges, trained


@exchanges
@on_ranks(2, timeout=20)
def test_two_of_stage_2_are_refused_until_one_is_deleted(exchange):
    net, zero, _ = trained(exchange)
    other = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, stage=2, lr=1.0)
    with pytest.raises(ValueError, match=r"expected one optimizer of stage 2 .*delete the other"):
        net.backward(2.0)
    del other
    zero.zero_grad()
    net.backward(3.0)
    zero.step()
    net.check(3.0)


@exchanges
@on_ranks(2, timeout=20)
def test_an_optimizer_that_replaces_another(exchange):
    """The old one, with its scheduler, goes when its names are given to the new one."""
    net, zero, _ = trained(exchange)
    scheduler = torch.optim.lr_scheduler.StepLR(zero, step_size=10)
    net.backward(2.0)
    zero.step()
    zero.zero_grad()
    zero = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, stage=2, exchange=exchange, lr=1.0, maximize=True
    )
    scheduler = torch.optim.lr_scheduler.StepLR(zero, step_size=10)
    net.backward(3.0)
    zero.step()
    scheduler.step()
    net.check(5.0)
