"""torch's Join: ranks with different numbers of batches."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.algorithms.join import Join
from training import (
    SHARDINGS,
    assert_differ,
    assert_equal,
    make_model,
    make_optimizer,
    parameters_of,
    train,
)


def uneven_run(sharding, counts):
    model = make_model()
    optimizer = make_optimizer(sharding, model.parameters(), torch.optim.Adam, lr=1e-2)
    # In the order of their communication: Join runs the hooks so.
    joinables = [model] if sharding is None else [model, optimizer]
    with Join(joinables):
        train(model, optimizer, range(counts[dist.get_rank()]))
    return parameters_of(model)


def check_join(sharding, counts):
    uneven = uneven_run(sharding, counts)
    others = [torch.empty_like(parameter) for parameter in uneven]
    for parameter, other in zip(uneven, others, strict=True):
        gathered = [torch.empty_like(parameter) for _ in counts]
        dist.all_gather(gathered, parameter)
        other.copy_(gathered[1 - dist.get_rank()])
    assert_equal(others, uneven)
    # The batches that only one rank had made a difference.
    assert_differ(uneven_run(sharding, [min(counts)] * len(counts)), uneven)


@pytest.mark.parametrize("counts", [(3, 7), (7, 3)])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_ranks_agree_after_uneven_inputs(sharding, counts):
    run_ranks(2, check_join, sharding, counts)


def check_parity(sharding, counts):
    expected = uneven_run(None, counts)
    assert_equal(uneven_run(sharding, counts), expected)


# torch's DDP drops the gradients that a rank without inputs helped to reduce, so that rank updates
# its share with those of its last batch. So does torch's own class.
@pytest.mark.parametrize("counts", [(3, 7), (7, 3)])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_uneven_inputs_as_with_a_plain_optimizer(sharding, counts):
    run_ranks(2, check_parity, sharding, counts)


def stop_early(sharding):
    model = make_model()
    optimizer = make_optimizer(sharding, model.parameters(), torch.optim.Adam, lr=1e-2)
    with (
        pytest.raises(RuntimeError, match="exhausted"),
        Join([model, optimizer], throw_on_early_termination=True),
    ):
        train(model, optimizer, range(2 + dist.get_rank()))


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_throw_on_early_termination(sharding):
    run_ranks(2, stop_early, sharding)
