"""named_parameters() are accepted as torch.optim accepts them."""

import pytest
import torch
from helpers import assert_same, copies, everywhere, make_net, make_parameters, on_ranks
from shardstep import ZeroRedundancyOptimizer

NAMES = ["a", "b.weight", "c"]


def pairs(options, optimizer_class=torch.optim.Adam, groups=lambda named: named):
    """Ours and the plain optimizer over the same named parameters, stepped once."""
    sharded = make_parameters(9, (3, 5), 7)
    plain = copies(sharded)
    optimizers = (
        ZeroRedundancyOptimizer(
            groups(list(zip(NAMES, sharded, strict=True))), optimizer_class, lr=0.1, **options
        ),
        optimizer_class(groups(list(zip(NAMES, plain, strict=True))), lr=0.1),
    )
    for parameters, optimizer in zip((sharded, plain), optimizers, strict=True):
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
    return optimizers


def in_two_groups(named):
    return [{"params": named[:2]}, {"params": named[2:], "lr": 0.5}]


@pytest.mark.parametrize("groups", [list, in_two_groups])
@pytest.mark.parametrize("options", [{}, {"sharding": "element"}], ids=["parameter", "element"])
@on_ranks(2)
def test_names_are_kept_in_groups_and_in_the_state_dict(options, groups):
    zero, plain = pairs(options, groups=groups)
    assert [name for group in zero.param_groups for name in group["param_names"]] == NAMES
    assert_same(everywhere(zero), plain.state_dict())


@on_ranks(2)
def test_a_generator_of_a_module():
    net = make_net()
    zero = ZeroRedundancyOptimizer(net.named_parameters(), torch.optim.SGD, lr=0.1)
    assert zero.param_groups[0]["param_names"] == [name for name, _ in net.named_parameters()]


@on_ranks(2)
def test_loaded_names_replace_ours_and_missing_ones_leave_them():
    zero, plain = pairs({})
    state = plain.state_dict()
    state["param_groups"][0]["param_names"] = ["x", "y", "z"]
    zero.load_state_dict(state)
    assert zero.param_groups[0]["param_names"] == ["x", "y", "z"]
    del state["param_groups"][0]["param_names"]
    zero.load_state_dict(state)
    assert zero.param_groups[0]["param_names"] == ["x", "y", "z"]


@on_ranks(2)
def test_names_come_back_from_a_checkpoint(tmp_path):
    zero, plain = pairs({})
    zero.save_checkpoint(tmp_path / "checkpoint")
    zero.load_checkpoint(tmp_path / "checkpoint")
    assert_same(everywhere(zero), plain.state_dict())


@on_ranks(2)
def test_added_groups_have_names_too_or_are_refused():
    zero, _ = pairs({})
    (extra,) = make_parameters(4)
    with pytest.raises(ValueError, match="names"):
        zero.add_param_group({"params": [extra]})
    zero.add_param_group({"params": [("extra", extra)]})
    assert zero.param_groups[1]["param_names"] == ["extra"]


MIXTURES = {
    "one name": (lambda a, b: [("a", a), b], ValueError),
    "another name": (lambda a, b: [a, ("b", b)], ValueError),
    "names and groups": (lambda a, b: [("a", a), {"params": [b]}], TypeError),
    "three of each": (lambda a, b: [("a", a, 1), ("b", b, 2)], TypeError),
    "names behind": (lambda a, b: [(a, "a"), (b, "b")], TypeError),
    "a named number": (lambda a, b: [{"params": [("a", 1.0)]}], TypeError),
}


@pytest.mark.parametrize("name", MIXTURES)
@on_ranks(2)
def test_mixtures_are_refused(name):
    mixed, error = MIXTURES[name]
    with pytest.raises(error):
        ZeroRedundancyOptimizer(mixed(*make_parameters(3, 4)), torch.optim.SGD, lr=0.1)
