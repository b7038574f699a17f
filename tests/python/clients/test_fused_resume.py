"""torch.optim.AdamW(fused=True), saved to a file and resumed by other processes."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from training import SHARDINGS, assert_differ, assert_equal, make_optimizer

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True, "fused": True}
SHAPES = [(40, 30), (30,), (), (7, 9), (513,)]


def make_parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]


def train(parameters, optimizer, steps):
    """Gradients are the same on every rank, so the number of ranks makes no difference."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def save_half_way(sharding, file):
    parameters = make_parameters()
    optimizer = make_optimizer(sharding, parameters, torch.optim.AdamW, **OPTIONS)
    train(parameters, optimizer, range(5))
    optimizer.consolidate_state_dict()
    if dist.get_rank() == 0:
        values = [parameter.detach() for parameter in parameters]
        torch.save({"parameters": values, "optimizer": optimizer.state_dict()}, file)


def resume(sharding, file):
    saved = torch.load(file, weights_only=True)
    parameters = [value.clone().requires_grad_() for value in saved["parameters"]]
    optimizer = make_optimizer(sharding, parameters, torch.optim.AdamW, **OPTIONS)
    optimizer.load_state_dict(saved["optimizer"])
    train(parameters, optimizer, range(5, 10))
    state = optimizer.consolidate_state_dict() if sharding else optimizer.state_dict()
    return [parameter.detach() for parameter in parameters], state


@pytest.fixture(scope="module")
def uninterrupted():
    parameters = make_parameters()
    optimizer = torch.optim.AdamW(parameters, **OPTIONS)
    train(parameters, optimizer, range(10))
    return [parameter.detach() for parameter in parameters], optimizer.state_dict()


@pytest.mark.part(1)
@pytest.mark.parametrize("ranks_before, ranks_after", [(2, 2), (2, 3), (4, 2)])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_resumes_bitwise(tmp_path, uninterrupted, sharding, ranks_before, ranks_after):
    file = tmp_path / "half.pt"
    run_ranks(ranks_before, save_half_way, sharding, file)
    expected_parameters, expected_state = uninterrupted
    results = run_ranks(ranks_after, resume, sharding, file)
    for parameters, _ in results:
        assert_equal(parameters, expected_parameters)
    assert_equal(results[0][1]["state"], expected_state["state"])
    assert results[0][1]["param_groups"] == expected_state["param_groups"]
    assert_differ(make_parameters(), expected_parameters)


@pytest.mark.part(1)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_plain_optimizer_goes_on(tmp_path, uninterrupted, sharding):
    file = tmp_path / "half.pt"
    run_ranks(2, save_half_way, sharding, file)
    parameters, state = resume(None, file)
    assert_equal(parameters, uninterrupted[0])
    assert_equal(state["state"], uninterrupted[1]["state"])
