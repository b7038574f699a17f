"""Subclasses that override state_dict, as existing trainers do."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from shardstep import ZeroRedundancyOptimizer
from training import SHARDINGS, assert_equal, make_model, parameters_of, train


class Annotated(ZeroRedundancyOptimizer):
    """Puts a key of its own into the dict."""

    epoch = 0

    def state_dict(self):
        return {**super().state_dict(), "epoch": self.epoch}

    def load_state_dict(self, state_dict):
        state_dict = dict(state_dict)
        self.epoch = state_dict.pop("epoch")
        super().load_state_dict(state_dict)


class SelfConsolidating(ZeroRedundancyOptimizer):
    """state_dict() is collective; only rank 0 has something to save. Trainers that know nothing of
    sharded optimizers call it on all ranks."""

    def state_dict(self):
        self.consolidate_state_dict()
        return super().state_dict() if self.rank == 0 else {}


def plain_half_and_whole():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train(model, optimizer, range(3))
    half = optimizer.state_dict()
    half = {**half, "state": {i: dict(s) for i, s in half["state"].items()}}
    for state in half["state"].values():
        state.update((name, value.clone()) for name, value in state.items())
    train(model, optimizer, range(3, 6))
    return half, parameters_of(model)


def check_annotated(sharding):
    half, whole = plain_half_and_whole()

    def build(model):
        return Annotated(model.parameters(), torch.optim.Adam, sharding=sharding, lr=1e-2)

    model = make_model()
    optimizer = build(model)
    train(model, optimizer, range(3))
    optimizer.epoch = 7
    optimizer.consolidate_state_dict()
    box = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    saved = box[0]
    assert saved["epoch"] == 7
    assert_equal(saved["state"], half["state"])
    assert saved["param_groups"] == half["param_groups"]

    again = build(model)
    again.load_state_dict(saved)
    assert again.epoch == 7
    assert saved["epoch"] == 7
    train(model, again, range(3, 6))
    assert_equal(parameters_of(model), whole)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_key_of_its_own(sharding):
    run_ranks(2, check_annotated, sharding)


def check_self_consolidating(sharding):
    half, whole = plain_half_and_whole()
    model = make_model()
    optimizer = SelfConsolidating(model.parameters(), torch.optim.Adam, sharding=sharding, lr=1e-2)
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()
    if dist.get_rank() == 0:
        assert_equal(saved["state"], half["state"])
    else:
        assert saved == {}
    train(model, optimizer, range(3, 6))
    assert_equal(parameters_of(model), whole)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_that_consolidates_by_itself(sharding):
    run_ranks(2, check_self_consolidating, sharding, timeout=10)
