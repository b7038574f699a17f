"""Parameters that are changed, frozen or given gradients after the optimizer was made."""

import pytest
import torch
from helpers import on_ranks
from shardstep import ZeroRedundancyOptimizer
from torch import nn


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 4, 2))


def backward(model):
    like = next(model.parameters())
    torch.manual_seed(1)
    images = torch.randn(2, 3, 4, 4).to(like.dtype)
    model(images).square().mean().backward()


CHANGES = {
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),
}


def refuses(options, change):
    model = make_model()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1, **options)
    backward(model)
    zero.step()
    zero.zero_grad()
    CHANGES[change](model)
    with pytest.raises(ValueError, match=r"expected .*parameter 0 .*\(rank \d of \d\)"):
        backward(model)
        zero.step()


@pytest.mark.parametrize("sharding", ["parameter", "element"])
@pytest.mark.parametrize("change", ["bfloat16", "double"])
@on_ranks(1, 2)
def test_a_dtype_that_changes_in_stage_2_is_an_error(sharding, change):
    refuses({"stage": 2, "sharding": sharding}, change)


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(1, 2)
def test_a_memory_order_that_changes_by_element_is_an_error(stage):
    refuses({"stage": stage, "sharding": "element"}, "channels_last")


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(1, 2)
def test_stage_1_by_parameter_follows_as_the_plain_optimizer_does(change):
    sharded, unsharded = make_model(), make_model()
    options = {"lr": 0.1, "momentum": 0.9}
    zero = ZeroRedundancyOptimizer(sharded.parameters(), torch.optim.SGD, **options)
    plain = torch.optim.SGD(unsharded.parameters(), **options)
    for step in range(3):
        if step == 1:
            CHANGES[change](sharded)
            CHANGES[change](unsharded)
        for model, optimizer in ((sharded, zero), (unsharded, plain)):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
        for ours, theirs in zip(sharded.parameters(), unsharded.parameters(), strict=True):
            assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(2, timeout=20)
def test_a_frozen_parameter_with_a_gradient_on_one_rank_is_an_error_on_all(stage):
    model = make_model()
    model[2].bias.requires_grad_(False)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, stage=stage)
    backward(model)
    if zero.rank == 1:
        model[2].bias.grad = torch.ones(2)
    with pytest.raises(ValueError, match="parameter 3"):
        zero.step()


@pytest.mark.parametrize("sharding", ["parameter", "element"])
@on_ranks(2)
def test_trainable_parameters_are_divided_evenly_in_stage_2(sharding):
    frozen = torch.zeros(1_000_000)
    trainable = [nn.Parameter(torch.zeros(10_000)) for _ in range(8)]
    zero = ZeroRedundancyOptimizer(
        [frozen, *trainable], torch.optim.SGD, lr=0.1, stage=2, sharding=sharding
    )
    own = sum(p.numel() for g in zero.optim.param_groups for p in g["params"] if p.requires_grad)
    assert abs(own - 40_000) <= 64


@pytest.mark.parametrize("exchange", ["pairwise", "shared_memory"])
@on_ranks(2)
def test_complex_gradients_are_clipped_by_their_whole_norm(exchange):
    param = nn.Parameter(torch.zeros(7, dtype=torch.complex64))
    zero = ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=0.1, stage=2, exchange=exchange)
    for _ in range(3):
        zero.zero_grad()
        (param * (3 + 4j)).real.sum().backward()
        assert float(zero.clip_grad_norm_(1.0)) == pytest.approx(5 * 7**0.5)
        zero.step()
