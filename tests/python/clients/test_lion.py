"""An optimizer that is not torch's: Lion, from the package lion-pytorch."""

import pytest
import torch.distributed as dist
from lion_pytorch import Lion
from ranks import run_ranks
from training import (
    SHARDINGS,
    assert_equal,
    make_model,
    make_optimizer,
    parameters_of,
    train,
)

OPTIONS = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.98), "decoupled_weight_decay": True}


def check_lion(sharding):
    model = make_model()
    plain = Lion(model.parameters(), **OPTIONS)
    train(model, plain, range(8))
    expected = parameters_of(model)

    model = make_model()
    optimizer = make_optimizer(sharding, model.parameters(), Lion, elementwise=True, **OPTIONS)
    train(model, optimizer, range(4))
    box = [optimizer.consolidate_state_dict()]
    dist.broadcast_object_list(box)
    optimizer = make_optimizer(sharding, model.parameters(), Lion, elementwise=True, **OPTIONS)
    optimizer.load_state_dict(box[0])
    train(model, optimizer, range(4, 8))
    assert isinstance(optimizer.optim, Lion)
    assert_equal(parameters_of(model), expected)

    optimizer.consolidate_state_dict(to=1)
    if dist.get_rank() == 1:
        assert_equal(optimizer.state_dict()["state"], plain.state_dict()["state"])


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_lion(sharding):
    run_ranks(2, check_lion, sharding)


def check_param_groups(sharding):
    model = make_model()
    plain = Lion(model.parameters(), **OPTIONS)
    optimizer = make_optimizer(sharding, model.parameters(), Lion, elementwise=True, **OPTIONS)
    dicts = optimizer.consolidate_state_dict(to=0), plain.state_dict()
    if dist.get_rank() == 0:
        assert dicts[0]["param_groups"] == dicts[1]["param_groups"]


# decoupled_weight_decay is an argument of Lion's constructor, but no key of its groups.
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_param_groups_are_the_plain_optimizers(sharding):
    run_ranks(2, check_param_groups, sharding)
