"""Several param groups: up front, added, and what each keeps of its own."""

import copy

import pytest
import torch
import torch.distributed as dist
from helpers import (
    Twins,
    assert_bitwise,
    assert_same,
    assert_same_on_all_ranks,
    consolidated,
    copies,
    every_layout,
    every_sharding,
    gathered,
    groups_over,
    make_parameters,
    on_ranks,
    ours,
    set_gradients,
    sparse_parameter,
)
from implementation import ZeroRedundancyOptimizer

SHAPES = [9, (3, 5), 7, (2, 2), 40, 1, (6, 3)]
GROUPS = [
    {"count": 2, "lr": 0.3},
    {"count": 1, "betas": (0.5, 0.9)},
    {"count": 4, "weight_decay": 0.1, "lr": 0.01},
]


@every_layout
@on_ranks(2, 4)
def test_up_front_or_added_later_or_unsharded(options):
    """Three ways to the same groups, each with options of its own; one result."""
    up_front, added, unsharded = (make_parameters(*SHAPES) for _ in range(3))
    first = ZeroRedundancyOptimizer(groups_over(up_front, GROUPS), torch.optim.AdamW, **options)
    groups = groups_over(added, GROUPS)
    second = ZeroRedundancyOptimizer(groups[:1], torch.optim.AdamW, **options)
    for group in groups[1:]:
        second.add_param_group(group)
    plain = torch.optim.AdamW(groups_over(unsharded, GROUPS))
    for number in range(4):
        for parameters, optimizer in ((up_front, first), (added, second), (unsharded, plain)):
            set_gradients(parameters, number)
            optimizer.step()
        assert_bitwise(up_front, unsharded)
        assert_bitwise(added, unsharded)
        if number == 1:
            for optimizer in (first, second, plain):
                optimizer.param_groups[2]["lr"] = 0.2
    for zero in (first, second):
        state = consolidated(zero)
        if state is not None:
            assert_same(state, plain.state_dict())


def frozen_first(parameters):
    parameters[0].requires_grad_(False)
    return parameters


@pytest.mark.part(8)
@pytest.mark.parametrize("some_frozen", [False, True])
@every_layout
@on_ranks(2, 4)
def test_added_in_the_middle_of_training(some_frozen, options):
    prepare = frozen_first if some_frozen else list
    twins = Twins(parameters=prepare(make_parameters(9, (3, 5))), options=options)
    twins.step(2)
    new = prepare(make_parameters(7, 20, (2, 2), seed=4))
    for parameters, optimizer in ((new, twins.zero), (copies(new), twins.plain)):
        optimizer.add_param_group({"params": parameters, "lr": 0.03, "weight_decay": 0.1})
        (twins.sharded if optimizer is twins.zero else twins.unsharded).extend(parameters)
    assert [len(group["params"]) for group in twins.zero.param_groups] == [2, 3]
    assert twins.zero.param_groups[1]["lr"] == 0.03
    assert len(twins.zero.optim.param_groups) == 2
    assert [id(p) for p in twins.zero._index_to_param] == [id(p) for p in twins.sharded]
    twins.step(3, seed=1)
    assert_same_on_all_ranks(twins.sharded)
    for index, parameter in enumerate(twins.sharded):
        frozen = some_frozen and index in (0, 2)
        start = make_parameters(9, (3, 5)) + make_parameters(7, 20, (2, 2), seed=4)
        assert torch.equal(parameter, start[index]) == frozen
    state = consolidated(twins.zero)
    if state is not None:
        assert_same(state, twins.plain.state_dict())


@every_layout
@on_ranks(2)
def test_unfrozen_when_added(options):
    """Fine-tuning: a frozen layer is made trainable, then handed over."""
    twins = Twins(parameters=make_parameters(9), options=options)
    layer = frozen_first(make_parameters((4, 4), seed=5))
    twins.step(1)
    layer[0].requires_grad_(True)
    others = copies(layer)
    twins.zero.add_param_group({"params": layer})
    twins.plain.add_param_group({"params": others})
    twins.sharded += layer
    twins.unsharded += others
    twins.step(2)


@ours
@every_sharding
@on_ranks(2)
def test_adding_a_group_keeps_what_was_set_since_the_last_step(options):
    first, second = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    zero = ZeroRedundancyOptimizer([first], torch.optim.SGD, lr=1.0, **options)
    zero.param_groups[0]["lr"] = 0.5
    zero.add_param_group({"params": [second], "lr": 0.25})
    assert [group["lr"] for group in zero.param_groups] == [0.5, 0.25]
    first.grad, second.grad = torch.ones(4), torch.ones(4)
    zero.step()
    assert torch.equal(first.detach(), torch.full((4,), -0.5))


@every_sharding
@on_ranks(2)
def test_what_is_no_new_group_is_refused(options):
    twins = Twins(options=options)
    for group, error, match in [
        ({"params": [twins.sharded[1]]}, ValueError, "more than one"),
        ([twins.sharded[1]], TypeError, "dict"),
        ({"params": [3.0]}, TypeError, "[Tt]ensor"),
        ({"params": [twins.sharded[1] * 2]}, ValueError, "leaf"),
    ]:
        with pytest.raises(error, match=match):
            twins.zero.add_param_group(group)
        assert len(twins.zero.param_groups) == 1
    twins.step(2)


@ours
@every_sharding
@on_ranks(2, 4, timeout=20)
def test_ranks_that_add_different_groups_all_raise(options):
    twins = Twins(options=options)
    twins.step(1)
    size = 5 if dist.get_rank() == 1 else 4
    with pytest.raises(ValueError, match="rank 1"):
        twins.zero.add_param_group({"params": make_parameters(size)})
    assert gathered(len(twins.zero.param_groups)) == [1] * dist.get_world_size()
    twins.step(2)


@ours
@on_ranks(2)
def test_added_groups_are_checked_as_the_first_ones():
    twins = Twins()
    double = make_parameters(3, dtype=torch.float64)
    for group in (double, [sparse_parameter()]):
        with pytest.raises(ValueError, match=r"dtype|dense|sparse"):
            twins.zero.add_param_group({"params": group})
        assert len(twins.zero.param_groups) == 1
    twins.step(1)


@every_sharding
@on_ranks(2, 4)
def test_many_small_groups(options):
    groups = [{"count": 1, "lr": 0.1 * (i + 1)} for i in range(len(SHAPES))]
    twins = Twins(torch.optim.SGD, make_parameters(*SHAPES), groups=groups, options=options)
    twins.step(3)
    assert len(twins.zero.optim.param_groups) == len(SHAPES)
    assert [g["lr"] for g in twins.zero.optim.param_groups] == [g["lr"] for g in groups]


@every_sharding
@on_ranks(2)
def test_a_group_without_parameters(options):
    groups = [{"count": 2}, {"count": 0, "lr": 0.7}, {"count": 2}]
    twins = Twins(groups=groups, options=options)
    twins.step(2)
    state = consolidated(twins.zero)
    if state is not None:
        assert_same(state, twins.plain.state_dict())


class Picky(torch.optim.SGD):
    """Refuses vectors, which only one rank owns."""

    def add_param_group(self, group):
        super().add_param_group(group)
        if any(param.dim() == 1 for param in self.param_groups[-1]["params"]):
            raise ValueError("no vectors")


@ours
@pytest.mark.parametrize("options", [{}, {"stage": 2}], ids=["stage 1", "stage 2"])
@pytest.mark.parametrize("own_class", [torch.optim.Muon, Picky, None])
@on_ranks(2)
def test_a_group_that_an_optimizer_refuses_on_one_rank_changes_nothing(own_class, options):
    model, late = (torch.nn.Linear(4, 4) for _ in range(2))
    plain_model, plain_late = copy.deepcopy(model), copy.deepcopy(late)
    optimizer_class = Picky if own_class is None else torch.optim.SGD
    zero = ZeroRedundancyOptimizer([model.weight], optimizer_class, **options, lr=0.1)
    refused = {"params": [late.bias]}
    if own_class is not None:
        refused |= {"optimizer_class": own_class, "lr": 0.1}
    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError), match=r"2D|no vectors"):
            zero.add_param_group(dict(refused))
        assert len(zero.param_groups) == len(zero.optim.param_groups) == 1
    zero.add_param_group({"params": [late.weight], "lr": 0.2})

    plain = torch.optim.SGD([plain_model.weight], lr=0.1)
    plain.add_param_group({"params": [plain_late.weight], "lr": 0.2})
    for optimizer, net, more in ((zero, model, late), (plain, plain_model, plain_late)):
        (net(torch.ones(2, 4)).sum() + more(torch.ones(2, 4)).square().sum()).backward()
        optimizer.step()
    assert_bitwise(
        [model.weight, late.weight, late.bias],
        [plain_model.weight, plain_late.weight, plain_late.bias],
    )
