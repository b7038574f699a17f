"""What copies and pickles of the optimizer and of the model do."""

import copy
import io
import pickle

import pytest
import torch
from helpers import assert_bitwise, batches, make_net, make_parameters, on_ranks, train
from shardstep import ZeroRedundancyOptimizer
from torch.optim.swa_utils import AveragedModel

EVERY_STAGE = pytest.mark.parametrize(
    "options",
    [
        {},
        {"parameters_as_bucket_view": True},
        {"stage": 2, "sharding": "element"},
        {"stage": 2, "sharding": "element", "share_parameters": True},
    ],
    ids=["stage1", "stage1-view", "stage2", "stage2-shared"],
)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
@on_ranks(2)
def test_a_copy_is_refused_with_what_to_do_instead(copied):
    zero = ZeroRedundancyOptimizer(make_parameters(9, 7), torch.optim.Adam, lr=0.1)
    with pytest.raises(TypeError, match=r"consolidate_state_dict.*\(rank \d of 2\)"):
        copied(zero)
    zero.step()


@EVERY_STAGE
@on_ranks(2)
def test_a_copied_model_is_its_own(options):
    model = make_net()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1, **options)
    first, second = batches(2)
    train(model, zero, first)
    copied = copy.deepcopy(model)
    before = [p.detach().clone() for p in copied.parameters()]
    assert_bitwise(copied.parameters(), model.parameters())
    train(model, zero, second)
    assert_bitwise(copied.parameters(), before)
    copied(second).sum().backward()
    assert all(p.grad is not None for p in copied.parameters())


@EVERY_STAGE
@on_ranks(2)
def test_an_averaged_model_follows(options):
    model = make_net()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1, **options)
    averaged = AveragedModel(model)
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for batch in batches(2):
        train(model, zero, batch)
        averaged.update_parameters(model)
        for total, p in zip(sums, model.parameters(), strict=True):
            total += p.detach()
    for mean, total in zip(averaged.parameters(), sums, strict=True):
        torch.testing.assert_close(mean.detach(), total / 2)


@pytest.mark.parametrize("overlap_forward", [False, True])
@on_ranks(2)
def test_a_model_is_pickled_whole(overlap_forward):
    model = make_net()
    options = {"overlap_forward": model} if overlap_forward else {}
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, lr=0.1, stage=2, sharding="element", **options
    )
    (batch,) = batches(1)
    train(model, zero, batch)
    zero.wait()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_bitwise(loaded.parameters(), model.parameters())
    loaded(batch)
