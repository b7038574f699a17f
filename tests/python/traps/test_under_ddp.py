"""Stage 2 under DistributedDataParallel would average twice: refused, whichever came first."""

import pytest
import torch
from ranks import run_ranks
from shardstep import ZeroRedundancyOptimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MESSAGE = r"remove DistributedDataParallel, or use stage 1"


def ddp_first(options):
    model = DistributedDataParallel(nn.Linear(5, 5), **options)
    with pytest.raises(ValueError, match=MESSAGE):
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, stage=2, lr=0.1)
    ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, stage=1, lr=0.1)


def ddp_last(options):
    net = nn.Linear(5, 5)
    zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, stage=2, lr=0.1)
    model = DistributedDataParallel(net, **options)
    with pytest.raises((ValueError, RuntimeError), match=MESSAGE):
        for _ in range(2):
            model(torch.ones(5)).sum().backward()
            zero.step()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("order", [ddp_first, ddp_last])
def test_refused(ranks, order, options):
    run_ranks(ranks, order, options)


def users_hooks():
    """These are no reason to refuse."""
    net = nn.Linear(5, 5)
    seen = []
    net.weight.register_hook(lambda gradient: seen.append("hook"))
    net.weight.register_post_accumulate_grad_hook(lambda p: seen.append(tuple(p.grad.shape)))
    accumulator = net.bias.expand_as(net.bias).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda *_: seen.append("accumulator"))
    gone = DistributedDataParallel(net)  # leaves its parameters when it goes
    del gone
    zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, stage=2, lr=0.1)
    for _ in range(2):
        zero.zero_grad()
        net(torch.ones(5)).sum().backward()
        zero.step()
    assert sorted(set(map(str, seen))) == ["(5, 5)", "accumulator", "hook"]


def test_hooks_of_users_stay():
    run_ranks(2, users_hooks)
