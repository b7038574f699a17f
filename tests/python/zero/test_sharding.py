"""Who owns what."""

import random

import pytest
import torch
import torch.distributed as dist
from helpers import (
    Twins,
    assert_bitwise,
    consolidated,
    gathered,
    make_parameters,
    on_ranks,
    ours,
    set_gradients,
    state_elements,
)
from implementation import ZeroRedundancyOptimizer
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeroRedundancyOptimizer

LINE = 16  # float32 elements in 64 bytes


def sharded(parameters, **options):
    return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1, **options)


def owned(zero, rank=None):
    """Elements that a rank has in each group."""
    groups = zero.optim.param_groups if rank is None else zero._partition_parameters()[rank]
    return [sum(p.numel() for p in group["params"]) for group in groups]


@on_ranks(1, 2, 3, 4)
def test_sizes_repeated_once_a_rank_are_shared_evenly():
    world_size = dist.get_world_size()
    zero = sharded(make_parameters(*[9, 7, 5, 3] * world_size))
    assert owned(zero) == [24]
    assert [owned(zero, rank) for rank in range(world_size)] == [[24]] * world_size


@on_ranks(2, 4)
def test_sizes_count_across_groups():
    """The second group fills up whom the first left behind."""
    parameters = make_parameters(10, *[2] * dist.get_world_size(), 8)
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    zero = sharded(groups)
    if dist.get_world_size() == 2:
        # 8, then 2 to the one with 8, then 2 to the first of the two with 10.
        assert gathered(owned(zero)) == [[10, 2], [0, 10]]
    else:
        assert gathered(owned(zero)) == [[10, 0], [0, 8], [0, 4], [0, 4]]


@on_ranks(2)
def test_largest_first_and_ties_to_the_first_rank():
    parameters = make_parameters(1, 4, 2, 4, 3)
    zero = sharded(parameters)
    ranks = [zero._param_to_rank[p] for p in parameters]
    # 4 to 0, 4 to 1, 3 to 0, 2 to 1, 1 to 1.
    assert ranks == [1, 0, 1, 1, 0]


@on_ranks(2, 4)
def test_added_groups_come_on_top():
    world_size = dist.get_world_size()
    zero = sharded(make_parameters(*[9, 7, 5, 3] * world_size))
    zero.add_param_group({"params": make_parameters(5), "lr": 0.5})
    zero.add_param_group({"params": make_parameters(*[6] * (world_size - 1))})
    added = [[24, 5, 0], *[[24, 0, 6]] * (world_size - 1)]
    assert gathered(owned(zero)) == added
    assert [owned(zero, rank) for rank in range(world_size)] == added


@on_ranks(2, 4)
def test_every_parameter_has_one_owner_that_all_know():
    parameters = make_parameters(5, (2, 3), 1, 12, 7, 7)
    zero = sharded([{"params": parameters[:2]}, {"params": parameters[2:]}])
    mine = {id(p) for group in zero.optim.param_groups for p in group["params"]}
    for parameter in parameters:
        assert (zero._param_to_rank[parameter] == zero.rank) == (id(parameter) in mine)
    indices = [i for i, p in enumerate(parameters) if id(p) in mine]
    assert sorted(i for each in gathered(indices) for i in each) == list(range(len(parameters)))


@on_ranks(2, 4)
def test_state_is_where_its_owner_is():
    twins = Twins(parameters=make_parameters(*[9, 7, 5, 3] * dist.get_world_size()))
    twins.step(1)
    assert gathered(state_elements(twins.zero, "exp_avg")) == [24] * dist.get_world_size()


@ours
@on_ranks(1, 2, 3, 4)
def test_by_parameter_as_torch_does():
    """The same owner for every parameter, whatever the sizes; added groups too."""
    choose = random.Random(5)
    for _ in range(20):
        sizes = [[choose.randint(1, 30) for _ in range(choose.randint(1, 8))] for _ in range(3)]
        parameters = [make_parameters(*group) for group in sizes]
        both = []
        for implementation in (ZeroRedundancyOptimizer, TorchZeroRedundancyOptimizer):
            groups = [{"params": group} for group in parameters[:2]]
            zero = implementation(groups, torch.optim.SGD, lr=0.1)
            zero.add_param_group({"params": parameters[2]})
            both.append([zero._param_to_rank[p] for group in parameters for p in group])
        assert both[0] == both[1], sizes


def elements_by_rank(parameters, **options):
    """State elements that each rank keeps by element, after a step that equals the plain one."""
    twins = Twins(parameters=parameters, options={"sharding": "element", **options})
    twins.step(2)
    return gathered(state_elements(twins.zero, "exp_avg"))


@ours
@pytest.mark.parametrize("view", [False, True])
@on_ranks(1, 2, 3, 4)
def test_by_element_no_rank_has_more_than_a_line_above_its_share(view):
    world_size = dist.get_world_size()
    options = {"parameters_as_bucket_view": view}
    # Whole lines that can be shared evenly are.
    even = elements_by_rank(make_parameters(LINE * 3 * world_size, LINE * world_size), **options)
    assert even == [LINE * 4] * world_size
    for lines in ([1], [5, 2], [1, 1, 1], [16, 1]):
        total = sum(lines) * LINE
        found = elements_by_rank(make_parameters(*[n * LINE for n in lines]), **options)
        assert sum(found) == total
        assert max(found) - total / world_size < LINE, found
    # One large parameter: by parameter, one rank would have it all.
    (large,) = make_parameters(1000)
    found = elements_by_rank([large], **options)
    assert sum(found) == 1000
    assert max(found) - 1000 / world_size <= LINE, found


@ours
@on_ranks(2, 4)
def test_by_element_no_rank_has_more_than_its_share_of_lines():
    """Of random sizes; a parameter that does not fill its last line counts as if it did."""
    choose = random.Random(7)
    for _ in range(5):
        sizes = [choose.randint(0, 200) for _ in range(choose.randint(1, 6))]
        found = elements_by_rank(make_parameters(*sizes))
        lines = sum(-(-size // LINE) for size in sizes)
        assert sum(found) == sum(sizes)
        assert max(found) <= -(-lines // dist.get_world_size()) * LINE, (sizes, found)


@ours
@pytest.mark.parametrize("view", [False, True])
@on_ranks(2, 4)
def test_more_ranks_than_elements(view):
    assert sum(elements_by_rank(make_parameters(1), parameters_as_bucket_view=view)) == 1
    assert sum(elements_by_rank(make_parameters(2, 1), parameters_as_bucket_view=view)) == 3
    assert sum(elements_by_rank(make_parameters(()), parameters_as_bucket_view=view)) == 1


@on_ranks(4)
@pytest.mark.parametrize("view", [False, True])
def test_more_ranks_than_parameters(view):
    options = {"parameters_as_bucket_view": view}
    twins = Twins(parameters=make_parameters((3, 2)), options=options)
    twins.step(2)
    assert gathered(state_elements(twins.zero, "exp_avg")) == [6, 0, 0, 0]
    state = consolidated(twins.zero)
    if state is not None:
        assert state["state"][0]["exp_avg"].shape == (3, 2)


@ours
@pytest.mark.parametrize("sharding", ["parameter", "element"])
@pytest.mark.parametrize("view", [False, True])
@on_ranks(1, 2, 3)
def test_parameters_without_elements(sharding, view):
    options = {"sharding": sharding, "parameters_as_bucket_view": view}
    twins = Twins(parameters=make_parameters((0, 3), 5, 0, (2, 0)), options=options)
    twins.step(3)
    state = consolidated(twins.zero)
    if state is not None:
        shapes = [tuple(s["exp_avg"].shape) for s in state["state"].values()]
        assert shapes == [(0, 3), (5,), (0,), (2, 0)]
    Twins(parameters=make_parameters(0), options=options).step(2)


@ours
@on_ranks(2, 4)
def test_added_groups_are_cut_too():
    parameters = make_parameters(LINE * 4)
    zero = sharded(parameters, sharding="element")
    zero.add_param_group({"params": make_parameters(LINE * 8)})
    world_size = dist.get_world_size()
    assert gathered(owned(zero)) == [[LINE * 4 // world_size, LINE * 8 // world_size]] * world_size


@pytest.mark.parametrize("sharding", ["parameter", pytest.param("element", marks=ours)])
@on_ranks(2, 4)
def test_views_of_one_buffer(sharding):
    """parameters_as_bucket_view moves parameters to buffers; other code sees no difference."""
    options = {} if sharding == "parameter" else {"sharding": sharding}
    parameters = make_parameters(9, (3, 5), 7, (2, 2, 2), 1)
    before = [p.detach().clone() for p in parameters]
    held = parameters[1]
    zero = sharded(parameters, parameters_as_bucket_view=True, **options)
    assert held is parameters[1]
    assert [p.shape for p in parameters] == [b.shape for b in before]
    assert [p.stride() for p in parameters] == [b.stride() for b in before]
    assert all(map(torch.equal, parameters, before))
    assert len(zero._buckets) == 1  # devices
    buffers = {b.untyped_storage().data_ptr() for device in zero._buckets for b in device}
    assert {p.untyped_storage().data_ptr() for p in parameters} <= buffers
    # Those who write through .data, or in place, are heard.
    set_gradients(parameters, seed=1)
    parameters[0].data.fill_(2.0)
    with torch.no_grad():
        parameters[2].copy_(torch.ones(7))
    zero.step()
    assert torch.equal(parameters[0], 2.0 - 0.1 * parameters[0].grad)
    assert torch.equal(parameters[2], torch.ones(7).add(parameters[2].grad, alpha=-0.1))


@ours
@pytest.mark.parametrize("sharding", ["parameter", "element"])
@pytest.mark.parametrize("view", [False, True])
@on_ranks(2)
def test_parameters_that_are_given_other_memory(sharding, view):
    options = {"sharding": sharding, "parameters_as_bucket_view": view}
    twins = Twins(options=options)
    twins.step(2)
    for parameter in (twins.sharded[1], twins.unsharded[1]):
        parameter.data = torch.full((3, 5), 0.5)
    twins.step(2, seed=1)


@ours
@pytest.mark.parametrize("sharding", ["parameter", "element"])
@pytest.mark.parametrize("view", [False, True])
@on_ranks(2, 3)
def test_parameters_in_other_orders_of_memory(sharding, view):
    """Channels-last and transposed weights: same values, same strides, and in their state."""
    convolution = make_parameters((6, 4, 3, 3))[0].detach()
    parameters = [
        torch.nn.Parameter(convolution.to(memory_format=torch.channels_last)),
        torch.nn.Parameter(make_parameters((7, 9))[0].detach().t()),
        *make_parameters(5),
    ]
    strides = [p.stride() for p in parameters]
    options = {"sharding": sharding, "parameters_as_bucket_view": view}
    twins = Twins(parameters=parameters, options=options)
    assert [p.stride() for p in twins.unsharded] == strides
    twins.step(3)
    assert [p.stride() for p in parameters] == strides
    state = consolidated(twins.zero)
    if state is not None:
        plain = twins.plain.state_dict()["state"]
        for index, expected in plain.items():
            assert_bitwise([state["state"][index]["exp_avg"]], [expected["exp_avg"]])
            assert state["state"][index]["exp_avg"].stride() == expected["exp_avg"].stride()
