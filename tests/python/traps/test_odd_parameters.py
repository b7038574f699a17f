"""Parameters that are listed twice, and parameters without memory of their own."""

import warnings

import device as devices
import pytest
import torch
import torch.distributed as dist
from helpers import (
    assert_bitwise,
    assert_same,
    copies,
    everywhere,
    heard,
    make_parameters,
    on_ranks,
    set_gradients,
)
from shardstep import ZeroRedundancyOptimizer
from torch import nn

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.1}),
}
every_sharding = pytest.mark.parametrize(
    "options", [{}, {"sharding": "element"}], ids=["parameter", "element"]
)


def with_repeats(parameters):
    a, b, c = parameters
    return [a, b, a, c, c]


@every_sharding
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(1, 2, 3)
def test_a_parameter_that_comes_twice_warns_and_goes_on_as_torchs(name, options):
    optimizer_class, defaults = OPTIMIZERS[name]
    sharded = make_parameters(9, (3, 5), 7)
    unsharded = copies(sharded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = optimizer_class(with_repeats(unsharded), **defaults)
    with heard() as texts:
        zero = ZeroRedundancyOptimizer(
            with_repeats(sharded), optimizer_class, **defaults, **options
        )
    assert any("duplicate parameters" in text for text in texts), texts
    for seed in range(3):
        set_gradients(sharded, seed)
        set_gradients(unsharded, seed)
        plain.step()
        zero.step()
        assert_bitwise(sharded, unsharded)
    state = plain.state_dict()
    assert_same(everywhere(zero), state)
    zero.load_state_dict(state)
    assert_same(everywhere(zero), state)


@on_ranks(2)
def test_a_repeat_survives_a_checkpoint(tmp_path):
    parameters = make_parameters(9, (3, 5), 7)
    zero = ZeroRedundancyOptimizer(with_repeats(parameters), torch.optim.Adam, lr=0.1)
    set_gradients(parameters, 0)
    zero.step()
    before = everywhere(zero)
    zero.save_checkpoint(tmp_path / "checkpoint")
    zero.load_checkpoint(tmp_path / "checkpoint")
    assert_same(everywhere(zero), before)


@every_sharding
@on_ranks(2)
def test_dtensors_are_refused_at_construction_by_name(options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh(devices.NAME, (dist.get_world_size(),))
    sharded = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
    (plain,) = make_parameters(3)
    for params, name in (
        ([plain, sharded], "parameter 1 of param group 0"),
        ([("a", plain), ("b", sharded)], "parameter 1 (b) of param group 0"),
    ):
        with pytest.raises(TypeError) as caught:
            ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1, **options)
        assert name in str(caught.value) and "DTensor" in str(caught.value)
    zero = ZeroRedundancyOptimizer([plain], torch.optim.SGD, lr=0.1, **options)
    with pytest.raises(TypeError, match="parameter 0 of param group 1"):
        zero.add_param_group({"params": [sharded]})
    zero.step()


@every_sharding
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(2)
def test_made_in_inference_mode_it_trains_as_outside(stage, flat, options):
    settings = {"stage": stage, "parameters_as_bucket_view": flat, "lr": 0.1, **options}
    inside, outside = make_parameters(9, (3, 5), 7), make_parameters(9, (3, 5), 7)
    with torch.inference_mode():
        zero = ZeroRedundancyOptimizer(inside, torch.optim.Adam, **settings)
    other = ZeroRedundancyOptimizer(outside, torch.optim.Adam, **settings)
    for _ in range(3):
        for optimizer, parameters in ((zero, inside), (other, outside)):
            optimizer.zero_grad()
            sum((p * p).sum() for p in parameters).backward()
            optimizer.step()
        assert_bitwise(inside, outside)
