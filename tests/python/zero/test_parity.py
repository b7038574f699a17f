"""Under DDP, losses and parameters equal those of the same local optimizer, bit for bit.

Both models run the same all-reduces of the same numbers, so sums are taken in the same order.
"""

import copy
import itertools

import pytest
import torch
from helpers import (
    assert_bitwise,
    assert_same,
    assert_same_on_all_ranks,
    batches,
    ddp_net,
    every_layout,
    every_sharding,
    everywhere,
    make_net,
    on_ranks,
    ours,
    train,
)
from implementation import ZeroRedundancyOptimizer
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

OPTIMIZERS = [
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
]


def trainable_from(ddp, number):
    """The first parameter is trained in every other batch, the third in the second half only."""
    first, _, third, *_ = ddp.parameters()
    first.requires_grad_(number % 2 == 0)
    third.requires_grad_(number >= 10)


@pytest.mark.part(3)
@pytest.mark.parametrize("maximize", [False, True])
@every_layout
@on_ranks(2)
def test_twenty_batches(maximize, options):
    """Trainability changes on the way, and half-way the two swap their state dicts."""
    for optimizer_class, defaults in OPTIMIZERS:
        ddps = [ddp_net(find_unused_parameters=True) for _ in range(2)]
        defaults = {"lr": 0.01, "maximize": maximize, **defaults}
        zero = ZeroRedundancyOptimizer(ddps[0].parameters(), optimizer_class, **options, **defaults)
        local = optimizer_class(ddps[1].parameters(), **defaults)
        try:
            train_twenty_batches(ddps, zero, local)
        except AssertionError as error:
            raise AssertionError(f"{optimizer_class.__name__} {defaults}") from error


def train_twenty_batches(ddps, zero, local):
    start = [p.detach().clone() for p in ddps[0].parameters()]
    for number, batch in enumerate(batches(20)):
        for ddp in ddps:
            trainable_from(ddp, number)
        losses = [train(*pair, batch) for pair in zip(ddps, (zero, local), strict=True)]
        assert torch.equal(*losses), number
        assert_bitwise(ddps[0].parameters(), ddps[1].parameters())
        if number == 9:
            whole, plain = everywhere(zero), copy.deepcopy(local.state_dict())
            assert_same(whole, plain)
            zero.load_state_dict(plain)
            local.load_state_dict(whole)
    assert_same_on_all_ranks(ddps[0].parameters())
    assert not any(map(torch.equal, ddps[0].parameters(), start))


@pytest.mark.part(4)
@every_layout
@on_ranks(2, 4)
def test_options_of_ddp(options):
    for view, static in itertools.product([False, True], repeat=2):
        kwargs = {"gradient_as_bucket_view": view, "static_graph": static}
        ddps = [ddp_net(**kwargs) for _ in range(2)]
        zero = ZeroRedundancyOptimizer(ddps[0].parameters(), torch.optim.Adam, lr=0.01, **options)
        local = torch.optim.Adam(ddps[1].parameters(), lr=0.01)
        for batch in batches(4):
            losses = [train(*pair, batch) for pair in zip(ddps, (zero, local), strict=True)]
            assert torch.equal(*losses), kwargs
            assert_bitwise(ddps[0].parameters(), ddps[1].parameters())


@every_layout
@on_ranks(2)
def test_a_parameter_that_no_rank_uses(options):
    ddps = [ddp_net(unused=True, find_unused_parameters=True) for _ in range(2)]
    decayed = {"lr": 0.01, "weight_decay": 0.5}
    zero = ZeroRedundancyOptimizer(ddps[0].parameters(), torch.optim.AdamW, **decayed, **options)
    local = torch.optim.AdamW(ddps[1].parameters(), **decayed)
    for batch in batches(4):
        for pair in zip(ddps, (zero, local), strict=True):
            train(*pair, batch)
        assert_bitwise(ddps[0].parameters(), ddps[1].parameters())
    untouched = make_net(unused=True).unused
    assert_bitwise(ddps[0].module.unused.parameters(), untouched.parameters())


@every_sharding
@on_ranks(2, 4)
def test_gradients_accumulated_without_sync(options):
    ddps = [ddp_net() for _ in range(2)]
    zero = ZeroRedundancyOptimizer(ddps[0].parameters(), torch.optim.Adam, lr=0.01, **options)
    local = torch.optim.Adam(ddps[1].parameters(), lr=0.01)
    for first, second in zip(batches(4), batches(4, seed=1), strict=True):
        for ddp, optimizer in zip(ddps, (zero, local), strict=True):
            with ddp.no_sync():
                ddp(first).square().sum().backward()
            ddp(second).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_bitwise(ddps[0].parameters(), ddps[1].parameters())


@every_layout
@on_ranks(2, 4)
def test_clipped_gradients(options):
    ddps = [ddp_net() for _ in range(2)]
    zero = ZeroRedundancyOptimizer(ddps[0].parameters(), torch.optim.SGD, lr=0.1, **options)
    local = torch.optim.SGD(ddps[1].parameters(), lr=0.1)
    for batch in batches(4):
        norms = []
        for ddp, optimizer in zip(ddps, (zero, local), strict=True):
            optimizer.zero_grad()
            ddp(batch).square().sum().backward()
            norms.append(nn.utils.clip_grad_norm_(ddp.parameters(), 0.5))
            optimizer.step()
        assert torch.equal(*norms)
        assert_bitwise(ddps[0].parameters(), ddps[1].parameters())


class TwoHalves(nn.Module):
    """A model of two parts that could be on two devices; activations move between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(11)
        self.front = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 6))
        self.back = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
        self.devices = [next(part.parameters()).device for part in (self.front, self.back)]

    def forward(self, x):
        middle = self.front(x.to(self.devices[0]))
        return self.back(middle.to(self.devices[1]))


@pytest.mark.part(4)
@every_layout
@on_ranks(2, 4)
def test_model_in_two_halves(options):
    """A group a half, with options of its own; DDP around the whole."""
    ddps = [DistributedDataParallel(TwoHalves()) for _ in range(2)]

    def groups(model):
        halves = list(model.front.parameters()), list(model.back.parameters())
        return [{"params": halves[0]}, {"params": halves[1], "lr": 0.1}]

    zero = ZeroRedundancyOptimizer(groups(ddps[0].module), torch.optim.Adam, lr=0.01, **options)
    local = torch.optim.Adam(groups(ddps[1].module), lr=0.01)
    for batch in batches(5):
        losses = [train(*pair, batch) for pair in zip(ddps, (zero, local), strict=True)]
        assert torch.equal(*losses)
    assert_bitwise(ddps[0].parameters(), ddps[1].parameters())
    assert_same(everywhere(zero), local.state_dict())


@every_layout
@on_ranks(2)
def test_an_optimizer_for_each_half(options):
    models = [TwoHalves() for _ in range(2)]
    ddps = [DistributedDataParallel(model) for model in models]
    zeros = [
        ZeroRedundancyOptimizer(half.parameters(), torch.optim.SGD, lr=lr, **options)
        for half, lr in ((models[0].front, 0.01), (models[0].back, 0.1))
    ]
    locals_ = [
        torch.optim.SGD(half.parameters(), lr=lr)
        for half, lr in ((models[1].front, 0.01), (models[1].back, 0.1))
    ]
    for batch in batches(5):
        for ddp, optimizers in zip(ddps, (zeros, locals_), strict=True):
            for optimizer in optimizers:
                optimizer.zero_grad()
            ddp(batch).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        assert_bitwise(ddps[0].parameters(), ddps[1].parameters())


@every_layout
@on_ranks(2)
def test_parameters_shared_by_layers(options):
    def tied():
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        model[2].weight = model[0].weight
        return DistributedDataParallel(model)

    ddps = [tied(), tied()]
    zero = ZeroRedundancyOptimizer(ddps[0].parameters(), torch.optim.Adam, lr=0.01, **options)
    local = torch.optim.Adam(ddps[1].parameters(), lr=0.01)
    for batch in batches(4):
        for pair in zip(ddps, (zero, local), strict=True):
            train(*pair, batch)
        assert_bitwise(ddps[0].parameters(), ddps[1].parameters())


@pytest.mark.part(4)
@ours
@every_layout
@on_ranks(2, 4)
def test_beside_torchs_own(options):
    """What a script sees when it changes the import: losses, parameters and state are the same."""
    shared = {key: value for key, value in options.items() if key != "sharding"}
    ddps = [ddp_net() for _ in range(2)]
    mine = ZeroRedundancyOptimizer(ddps[0].parameters(), torch.optim.AdamW, lr=0.01, **options)
    torchs = TorchZeroRedundancyOptimizer(
        ddps[1].parameters(), torch.optim.AdamW, lr=0.01, **shared
    )
    for batch in batches(5):
        losses = [train(*pair, batch) for pair in zip(ddps, (mine, torchs), strict=True)]
        assert torch.equal(*losses)
    assert_bitwise(ddps[0].parameters(), ddps[1].parameters())
    assert_same(everywhere(mine), everywhere(torchs))
    # Saved by one, loaded by the other.
    states = [everywhere(zero) for zero in (mine, torchs)]
    mine.load_state_dict(copy.deepcopy(states[1]))
    torchs.load_state_dict(copy.deepcopy(states[0]))
    for batch in batches(3, seed=1):
        for pair in zip(ddps, (mine, torchs), strict=True):
            train(*pair, batch)
    assert_bitwise(ddps[0].parameters(), ddps[1].parameters())
