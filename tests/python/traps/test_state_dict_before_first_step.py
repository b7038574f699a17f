"""With nothing to gather, state_dict() is the plain optimizer's, on every rank."""

import pytest
import torch
from helpers import assert_same, copies, make_parameters, on_ranks, set_gradients
from shardstep import ZeroRedundancyOptimizer

every_sharding = pytest.mark.parametrize(
    "options", [{}, {"sharding": "element"}, {"stage": 2}], ids=["parameter", "element", "stage2"]
)


@every_sharding
@on_ranks(1, 3)
def test_before_the_first_step(options):
    parameters = make_parameters(9, 7)  # by parameter, the third rank owns nothing
    plain = torch.optim.Adam(copies(parameters), lr=0.1)
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.1, **options)
    assert_same(zero.state_dict(), plain.state_dict())
    zero.load_state_dict(zero.state_dict())
    assert_same(zero.state_dict(), plain.state_dict())


@every_sharding
@on_ranks(3)
def test_after_a_step_it_must_be_consolidated(options):
    parameters = make_parameters(9, 7)
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.1, **options)
    if options.get("stage") == 2:
        sum(p.square().sum() for p in parameters).backward()
    else:
        set_gradients(parameters, 0)
    zero.step()
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        zero.state_dict()


@on_ranks(3)
def test_state_that_is_there_from_the_start_must_be_consolidated():
    parameters = make_parameters(9, 7)
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.Adagrad, lr=0.1)
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        zero.state_dict()


@on_ranks(3)
def test_a_loaded_state_must_be_consolidated():
    parameters = make_parameters(9, 7)
    twin = copies(parameters)
    plain = torch.optim.Adam(twin, lr=0.1)
    set_gradients(twin, 0)
    plain.step()
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.1)
    zero.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        zero.state_dict()


@on_ranks(2)
def test_what_accelerate_does_with_it():
    """It moves every tensor of the state to the device, and loads that."""
    parameters = make_parameters(9, 7)
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.1)
    state_dict = zero.state_dict()
    state_dict["param_groups"] = [dict(group) for group in state_dict["param_groups"]]
    zero.load_state_dict(state_dict)
    set_gradients(parameters, 0)
    zero.step()
