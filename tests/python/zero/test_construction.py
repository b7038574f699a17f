"""What ZeroRedundancyOptimizer accepts, and how it refuses the rest."""

import device as devices
import pytest
import torch
import torch.distributed as dist
from helpers import (
    Twins,
    consolidated,
    gathered,
    make_parameters,
    on_ranks,
    ours,
    set_gradients,
    sparse_parameter,
)
from implementation import ZeroRedundancyOptimizer
from torch import nn
from torch.distributed.algorithms.join import Joinable

either_sharding = pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="parameter"),
        pytest.param({"sharding": "element"}, marks=ours, id="element"),
    ],
)


def refuses(error, match, parameters, **options):
    with pytest.raises(error, match=match):
        ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1, **options)


def containers(parameters):
    first, *rest = parameters
    yield parameters
    yield tuple(parameters)
    yield iter(parameters)
    yield (p for p in parameters)
    yield dict(enumerate(parameters)).values()
    yield nn.ParameterList(parameters).parameters()
    yield [{"params": parameters}]
    yield ({"params": group} for group in ([first], rest))
    yield [{"params": [first], "lr": 0.5}, {"params": rest}]


@either_sharding
@on_ranks(2)
def test_any_iterable_of_tensors_or_groups(options):
    for number in range(len(list(containers(make_parameters(2, 3, 4))))):
        parameters = make_parameters(2, 3, 4)
        container = list(containers(parameters))[number]
        zero = ZeroRedundancyOptimizer(container, torch.optim.SGD, lr=0.1, **options)
        held = [p for group in zero.param_groups for p in group["params"]]
        assert [id(p) for p in held] == [id(p) for p in parameters]
        assert [id(p) for p in zero._all_params] == [id(p) for p in parameters]
        before = parameters[0].detach().clone()
        set_gradients(parameters, seed=number)
        zero.step()
        lr = zero.param_groups[0]["lr"]
        assert torch.equal(parameters[0], before.add(parameters[0].grad, alpha=-lr))


@ours
@either_sharding
@on_ranks(2)
def test_a_group_holds_what_a_plain_group_holds(options):
    first, second = make_parameters(4, 5)
    groups = [{"params": first}, {"params": (p for p in [second])}]
    zero = ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=0.1, **options)
    assert [[id(p) for p in group["params"]] for group in zero.param_groups] == [
        [id(first)],
        [id(second)],
    ]
    expected = [p.detach() - 0.1 for p in (first, second)]
    first.grad, second.grad = torch.ones(4), torch.ones(5)
    zero.step()
    assert all(map(torch.equal, (first, second), expected))


@either_sharding
@on_ranks(2)
def test_what_is_no_parameters_is_refused(options):
    first, second = make_parameters(2, 3)
    refuses(ValueError, "empty|none", [], **options)
    refuses(ValueError, "empty|none", iter(()), **options)
    refuses(TypeError, "iterable|param groups", first, **options)
    refuses(TypeError, "iterable|param groups", 1.5, **options)
    refuses(TypeError, "iterable|param groups", None, **options)
    refuses(TypeError, "iterable|param groups", "weights", **options)
    refuses(TypeError, "iterable|param groups", [first, 2], **options)
    refuses(TypeError, "iterable|param groups", [1, 2], **options)
    refuses(TypeError, "iterable|param groups", [first, {"params": [second]}], **options)
    refuses(TypeError, "iterable|param groups", [{"params": [second]}, first], **options)
    refuses(ValueError, "params", [{"lr": 0.1}], **options)
    refuses(ValueError, "params", [{"params": [first]}, {"lr": 0.1}], **options)
    # The group is as good as before.
    zero = ZeroRedundancyOptimizer([first, second], torch.optim.SGD, lr=0.1, **options)
    set_gradients([first, second], seed=0)
    zero.step()


@either_sharding
@on_ranks(2)
def test_what_the_plain_optimizer_refuses_is_refused(options):
    first, second = make_parameters(2, 3)
    refuses(ValueError, "leaf", [first * 2], **options)
    refuses(
        ValueError, "more than one", [{"params": [first]}, {"params": [second, first]}], **options
    )
    with pytest.raises(ValueError, match="learning rate"):
        ZeroRedundancyOptimizer([first], torch.optim.SGD, lr=-1.0, **options)
    with pytest.raises(TypeError, match="warmth"):
        ZeroRedundancyOptimizer([first], torch.optim.SGD, lr=0.1, warmth=1, **options)
    with pytest.raises(TypeError, match="optimizer_class"):
        ZeroRedundancyOptimizer([first], **options)


@ours
@either_sharding
@on_ranks(2)
def test_what_a_plain_group_refuses_is_refused(options):
    first, second = make_parameters(2, 3)
    refuses(TypeError, "[Tt]ensor", [{"params": [3]}], **options)
    refuses(TypeError, "set", [{"params": {first, second}}], **options)


@either_sharding
@on_ranks(2)
def test_sparse_parameters_are_refused(options):
    (dense,) = make_parameters(3)
    sparse = sparse_parameter()
    refuses(ValueError, "sparse|dense", [sparse], **options)
    refuses(ValueError, "sparse|dense", [sparse, dense], **options)
    refuses(ValueError, "sparse|dense", [dense, sparse], **options)
    refuses(ValueError, "sparse|dense", [{"params": [dense]}, {"params": [sparse]}], **options)


MIXED = [(7, torch.float32), ((3, 5), torch.float64), (9, torch.float32), (4, torch.bfloat16)]


def mixed_parameters():
    return [make_parameters(shape, dtype=dtype)[0] for shape, dtype in MIXED]


@on_ranks(2)
def test_mixed_dtypes_are_refused_by_parameter():
    single, double = make_parameters(2)[0], make_parameters(3, dtype=torch.float64)[0]
    refuses(ValueError, "dense type|dtype", [single, double])
    refuses(ValueError, "dense type|dtype", [{"params": [double]}, {"params": [single]}])
    refuses(ValueError, "dense type|dtype", mixed_parameters(), parameters_as_bucket_view=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@either_sharding
@on_ranks(2)
def test_one_dtype_is_fine_whichever_it_is(dtype, options):
    Twins(parameters=make_parameters(9, (3, 5), 7, dtype=dtype), options=options).step(3)


@ours
@pytest.mark.parametrize("view", [False, True])
@on_ranks(1, 2, 4)
def test_mixed_dtypes_are_taken_by_element(view):
    options = {"sharding": "element", "parameters_as_bucket_view": view}
    twins = Twins(parameters=mixed_parameters(), options=options)
    twins.step(4)
    assert [p.dtype for p in twins.sharded] == [dtype for _, dtype in MIXED]
    state = consolidated(twins.zero)
    if state is not None:
        assert [s["exp_avg"].dtype for s in state["state"].values()] == [d for _, d in MIXED]


@either_sharding
@on_ranks(2, 4)
def test_attributes(options):
    parameters = make_parameters(9, 7, 5)
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.25, **options)
    assert isinstance(zero, torch.optim.Optimizer)
    assert isinstance(zero, Joinable)
    assert type(zero.optim) is torch.optim.Adam
    assert zero.process_group is dist.group.WORLD
    assert zero.world_size == dist.get_world_size()
    assert zero.rank == zero.global_rank == dist.get_rank()
    assert zero.parameters_as_bucket_view is False
    assert zero.initialized is True
    assert zero.defaults["lr"] == 0.25
    assert not zero.state
    (group,) = zero.param_groups
    assert group["lr"] == 0.25
    # Also what only the local optimizer's defaults say.
    assert group["betas"] == (0.9, 0.999)
    assert zero.optim.param_groups[0]["lr"] == 0.25
    assert zero.join_device == devices.current()
    assert zero.join_process_group is zero.process_group
    assert zero._overlap_with_ddp is False
    assert "Adam" in repr(zero) or "ZeroRedundancyOptimizer" in repr(zero)


@on_ranks(2)
def test_arguments_by_position():
    """As torch's: params, optimizer_class, process_group, parameters_as_bucket_view, overlap."""
    group = dist.new_group([0, 1])
    zero = ZeroRedundancyOptimizer(make_parameters(3), torch.optim.SGD, group, True, False, lr=0.5)
    assert zero.process_group is group
    assert zero.parameters_as_bucket_view is True
    assert zero._overlap_with_ddp is False
    with pytest.raises(TypeError):
        ZeroRedundancyOptimizer(make_parameters(3), torch.optim.SGD, group, True, False, "element")


@on_ranks(2)
def test_arguments_by_name():
    zero = ZeroRedundancyOptimizer(
        params=make_parameters(3),
        optimizer_class=torch.optim.SGD,
        process_group=None,
        parameters_as_bucket_view=False,
        overlap_with_ddp=False,
        lr=0.5,
        momentum=0.25,
    )
    assert zero.process_group is dist.group.WORLD
    assert zero.optim.param_groups[0]["momentum"] == 0.25


@ours
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 1},
        {"sharding": "parameter"},
        {"sharding": "element"},
        {"exchange": "auto"},
        {"exchange": "native"},
        {"exchange": "pairwise"},
        {"bucket_cap_mb": 0},
        {"bucket_cap_mb": 1},
        {"bucket_cap_mb": 1e-5, "sharding": "element"},
        {"exchange": "native", "sharding": "element", "parameters_as_bucket_view": True},
    ],
)
@on_ranks(2)
def test_our_options(options):
    twins = Twins(options=options)
    twins.step(2)
    assert not options.keys() & twins.zero.defaults.keys()
    assert not options.keys() & twins.zero.param_groups[0].keys()


@ours
@pytest.mark.parametrize(
    "options, named",
    [
        ({"sharding": "row"}, "row"),
        ({"exchange": "pigeon"}, "pigeon"),
        ({"stage": 0}, "stage"),
        ({"stage": 4}, "stage"),
        ({"bucket_cap_mb": -1.0}, "bucket_cap_mb"),
        ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb"),
    ],
)
@on_ranks(2)
def test_our_options_are_checked(options, named):
    refuses(ValueError, named, make_parameters(3), **options)


@on_ranks(2)
def test_trainable_or_not():
    parameters = make_parameters(4, 6)
    parameters[1].requires_grad_(False)
    twins = Twins(parameters=parameters)
    twins.step(2)
    assert torch.equal(parameters[1], make_parameters(4, 6)[1])


@on_ranks(2)
def test_construction_changes_no_parameter():
    for view in (False, True):
        parameters = make_parameters(9, (3, 5), 7)
        ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1, parameters_as_bucket_view=view)
        for parameter, expected in zip(parameters, make_parameters(9, (3, 5), 7), strict=True):
            assert torch.equal(parameter, expected)
            assert parameter.grad is None
            assert parameter.requires_grad


def construct_and_report(parameters, optimizer_class=torch.optim.SGD, **options):
    """What each rank got: None, or its error."""
    try:
        ZeroRedundancyOptimizer(parameters, optimizer_class, **{"lr": 0.1} | options)
        error = None
    except ValueError as raised:
        error = str(raised)
    return gathered(error)


def assert_all_name(errors, *words):
    for rank, error in enumerate(errors):
        assert error is not None, f"rank {rank} of {errors}"
        for word in words:
            assert word in error, f"rank {rank}: {word!r} not in {error!r}"


@ours
@either_sharding
@on_ranks(2, 4, timeout=20)
def test_ranks_that_differ_are_named_on_every_rank(options):
    odd = dist.get_rank() == 1

    def check(*words, **differing):
        assert_all_name(construct_and_report(**options | differing), "rank 1", *words)

    shapes = [9, (3, 5) if odd else (5, 3), 7]
    check("parameter 1", "3, 5", parameters=make_parameters(*shapes))
    check("parameter 2", parameters=make_parameters(*([2, 3, 4] if odd else [2, 3])))
    dtype = torch.float64 if odd else torch.float32
    check("parameter 0", parameters=make_parameters(4, dtype=dtype))
    check("lr", parameters=make_parameters(4), lr=0.5 if odd else 0.1)
    check("momentum", parameters=make_parameters(4), momentum=0.5 if odd else 0.0)
    optimizer_class = torch.optim.Adam if odd else torch.optim.SGD
    check("Adam", parameters=make_parameters(4), optimizer_class=optimizer_class)
    check(parameters=make_parameters(4), parameters_as_bucket_view=odd)
    # A first group of one, or of two.
    first, second, third = make_parameters(2, 3, 4)
    groups = ([first], [second, third]) if odd else ([first, second], [third])
    check(parameters=[{"params": group} for group in groups])
    # Without a difference, everything works.
    assert construct_and_report(make_parameters(4), **options) == [None] * dist.get_world_size()


@ours
@on_ranks(2, 4, timeout=20)
def test_ranks_that_differ_in_sharding_all_raise():
    sharding = "element" if dist.get_rank() == 1 else "parameter"
    errors = construct_and_report(make_parameters(4), sharding=sharding)
    assert_all_name(errors, "rank 1", "sharding")
    overlap = dist.get_rank() == 1
    errors = construct_and_report(make_parameters(4), overlap_with_ddp=overlap)
    assert_all_name(errors, "rank 1", "overlap")


@ours
@on_ranks(2, 4, timeout=20)
def test_a_mistake_on_one_rank_is_an_error_on_all():
    """The mistaken rank raises its own error, the others one that names the rank."""
    mistaken = dist.get_rank() == 1

    def check(parameters, *own):
        errors = construct_and_report(parameters if mistaken else make_parameters(4))
        assert_all_name(errors[1:2], *own)
        assert_all_name([*errors[:1], *errors[2:]], "rank 1 failed", *own)

    check([], "none")
    check([sparse_parameter()], "parameter 0")
    check([{"lr": 0.1}], "params")
    check([make_parameters(2)[0] * 2], "leaf")
    assert construct_and_report(make_parameters(4)) == [None] * dist.get_world_size()
