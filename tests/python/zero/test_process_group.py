"""Groups other than the default: ranks need not start at 0 or be contiguous."""

import pytest
import torch
import torch.distributed as dist
from helpers import (
    assert_bitwise,
    assert_same,
    assert_same_on_all_ranks,
    consolidated,
    copies,
    every_layout,
    make_parameters,
    on_ranks,
    set_gradients,
)
from implementation import ZeroRedundancyOptimizer

MEMBERS = {4: ([0, 2], [1, 3], [3, 1], [1, 2, 3]), 2: ([1], [0, 1])}


@every_layout
@on_ranks(2, 4)
def test_training_and_state_in_a_part_of_the_world(options):
    for members in MEMBERS[dist.get_world_size()]:
        group = dist.new_group(members)
        if dist.get_rank() not in members:
            continue
        parameters = make_parameters(9, (3, 5), 7, (2, 2))
        others = copies(parameters)
        zero = ZeroRedundancyOptimizer(
            parameters, torch.optim.Adam, process_group=group, lr=0.1, **options
        )
        plain = torch.optim.Adam(others, lr=0.1)
        assert zero.process_group is group
        assert zero.world_size == len(members)
        assert zero.rank == dist.get_group_rank(group, dist.get_rank())
        assert zero.global_rank == dist.get_rank()
        assert len(zero._partition_parameters()) == len(members)
        assert set(zero._param_to_rank.values()) <= set(range(len(members)))
        for number in range(3):
            set_gradients(parameters, number)
            set_gradients(others, number)
            zero.step()
            plain.step()
            assert_bitwise(parameters, others)
        assert_same_on_all_ranks(parameters, group)
        for to in range(len(members)):  # of the group
            state = consolidated(zero, to)
            assert (state is not None) == (zero.rank == to)
            if state is not None:
                assert_same(state, plain.state_dict())
                zero.load_state_dict(state)
        set_gradients(parameters, 9)
        set_gradients(others, 9)
        zero.step()
        plain.step()
        assert_bitwise(parameters, others)


@on_ranks(4)
def test_two_groups_train_side_by_side():
    """Even and odd ranks: other parameters, other optimizers, no message goes astray."""
    even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
    mine, seed = (even, 1) if dist.get_rank() % 2 == 0 else (odd, 2)
    parameters = make_parameters(*[9, 7, 5][: seed + 1], seed=seed)
    others = copies(parameters)
    optimizer_class = [torch.optim.Adam, torch.optim.SGD][seed - 1]
    zero = ZeroRedundancyOptimizer(parameters, optimizer_class, mine, lr=0.1)
    plain = optimizer_class(others, lr=0.1)
    for number in range(4):
        set_gradients(parameters, number)
        set_gradients(others, number)
        zero.step()
        plain.step()
    assert_bitwise(parameters, others)
    assert_same_on_all_ranks(parameters, mine)


@pytest.mark.parametrize("view", [False, True])
@on_ranks(4)
def test_overlapping_groups(view):
    """One optimizer over the world, one over a part of it, in the same process."""
    part = dist.new_group([1, 2])
    inside = dist.get_rank() in (1, 2)
    wide, narrow = make_parameters(9, 7), make_parameters((3, 5), 4, seed=2)
    wide_copy, narrow_copy = copies(wide), copies(narrow)
    optimizers = [
        ZeroRedundancyOptimizer(wide, torch.optim.Adam, parameters_as_bucket_view=view, lr=0.1),
        torch.optim.Adam(wide_copy, lr=0.1),
    ]
    if inside:
        optimizers += [
            ZeroRedundancyOptimizer(
                narrow, torch.optim.SGD, part, parameters_as_bucket_view=view, lr=0.1
            ),
            torch.optim.SGD(narrow_copy, lr=0.1),
        ]
    for number in range(3):
        for parameters in (wide, wide_copy, narrow, narrow_copy):
            set_gradients(parameters, number)
        for optimizer in optimizers:
            optimizer.step()
    assert_bitwise(wide, wide_copy)
    if inside:
        assert_bitwise(narrow, narrow_copy)
