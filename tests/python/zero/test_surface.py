"""Every name of torch's type stub exists and returns correct values."""

import enum
import importlib
import inspect

import device as devices
import pytest
import torch
import torch.distributed as dist
from helpers import (
    Twins,
    assert_bitwise,
    copies,
    every_layout,
    every_sharding,
    make_parameters,
    on_ranks,
    ours,
    set_gradients,
)
from implementation import ZeroRedundancyOptimizer, hook_module, zero_module
from torch.distributed.algorithms.join import Joinable, JoinHook

ATTRIBUTES = [
    *("initialized", "process_group", "world_size", "rank", "global_rank"),
    *("parameters_as_bucket_view", "optim", "param_groups", "state", "defaults"),
    *("_overlap_with_ddp", "_buckets", "_all_params", "_param_to_index", "_param_to_rank"),
    *("_index_to_param", "join_device", "join_process_group"),
]
METHODS = [
    *("add_param_group", "consolidate_state_dict", "step", "load_state_dict", "state_dict"),
    *("zero_grad", "join_hook", "_local_step", "_get_assigned_rank", "_init_zero_for_overlap"),
    *("_partition_parameters", "_sync_param_groups", "_check_overlap_initialized"),
]
OVERLAP_INFO = [
    *("status", "params_per_bucket", "params_per_rank", "offsets", "broadcast_handles"),
    *("bucket_index_to_future", "bucket_index_to_bucket", "bucket_indices_seen"),
    *("assigned_ranks_per_bucket", "total_size", "shard_buckets"),
]


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=ours)])
@on_ranks(2)
def test_names_of_the_stub(overlap):
    zero = ZeroRedundancyOptimizer(
        make_parameters(9, 7), torch.optim.SGD, overlap_with_ddp=overlap, lr=0.1
    )
    for name in ATTRIBUTES:
        assert hasattr(zero, name), name
    for name in METHODS:
        assert callable(getattr(zero, name)), name
    assert zero._overlap_with_ddp is overlap


@ours
@on_ranks(2)
def test_names_that_torchs_stub_promises_and_its_class_lacks():
    zero = ZeroRedundancyOptimizer(make_parameters(9, 7), torch.optim.SGD, lr=0.1)
    assert zero._device_to_device_index == {devices.current(): 0}
    assert zero.functional_optim_map is torch.distributed.optim.utils.functional_optim_map


def test_signatures():
    """Positional parameters are torch's, in order and with its defaults."""
    torchs = torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer
    for name in ("__init__", *METHODS):
        mine, theirs = (
            [
                (p.name, p.default)
                for p in inspect.signature(getattr(cls, name)).parameters.values()
                if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)
            ]
            for cls in (ZeroRedundancyOptimizer, torchs)
        )
        assert mine == theirs, name
    hooks = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook")
    for name in ("hook_with_zero_step", "hook_with_zero_step_interleaved"):
        mine, theirs = (
            [(p.name, p.default) for p in inspect.signature(hook).parameters.values()]
            for hook in (getattr(hook_module, name), getattr(hooks, name))
        )
        assert mine == theirs, name


def test_classes_of_the_module():
    assert issubclass(ZeroRedundancyOptimizer, torch.optim.Optimizer)
    assert issubclass(ZeroRedundancyOptimizer, Joinable)
    assert issubclass(zero_module._ZeROJoinHook, JoinHook)
    assert issubclass(zero_module._OverlapStatus, enum.IntEnum)
    statuses = [(s.name, s.value) for s in zero_module._OverlapStatus]
    assert statuses == [("UNINITIALIZED", 0), ("DDP_HAS_REBUILT_BUCKETS", 1), ("INITIALIZED", 2)]
    assert zero_module.__all__ == ["ZeroRedundancyOptimizer"]


def test_overlap_info():
    info = zero_module._OverlapInfo(3)
    for name in OVERLAP_INFO:
        assert hasattr(info, name), name
    assert info.status == zero_module._OverlapStatus.UNINITIALIZED
    assert info.params_per_rank == [[], [], []]
    assert info.shard_buckets is False
    info.bucket_indices_seen.append(0)
    info.bucket_index_to_future[0] = torch.futures.Future()
    info.bucket_index_to_bucket[0] = None
    info.clear_per_iter_info()
    assert not info.bucket_indices_seen
    assert not info.bucket_index_to_future
    assert not info.bucket_index_to_bucket


def test_overlap_info_waits_for_every_broadcast():
    class Handle:
        waited = 0

        def wait(self):
            self.waited += 1

    info = zero_module._OverlapInfo(2)
    handles = [Handle(), Handle()]
    info.broadcast_handles.extend(handles)
    info.num_bucket_assignments = 2
    info.wait_for_broadcasts()
    assert [handle.waited for handle in handles] == [1, 1]
    assert info.broadcast_handles == []


def test_bucket_assignment():
    parameters = make_parameters(3, 4)
    assignment = zero_module._DDPBucketAssignment(5, parameters, 2)
    assert assignment.bucket_index == 5
    assert assignment.parameters is parameters
    assert assignment.offset == 2
    assert assignment.device == parameters[0].device
    assert assignment.tensor is None
    with pytest.raises(ValueError):
        zero_module._DDPBucketAssignment(5, [], 2)


@ours
@on_ranks(2)
def test_it_passes_for_torchs():
    zero = ZeroRedundancyOptimizer(make_parameters(9, 7), torch.optim.SGD, lr=0.1)
    torchs = torch.distributed.optim.ZeroRedundancyOptimizer
    assert ZeroRedundancyOptimizer is not torchs
    assert isinstance(zero, torchs)
    assert issubclass(ZeroRedundancyOptimizer, torchs)
    assert not isinstance(zero.optim, torchs)
    torchs_own = torchs(make_parameters(9, 7), torch.optim.SGD, lr=0.1)
    assert isinstance(torchs_own, torchs)
    assert not isinstance(torchs_own, ZeroRedundancyOptimizer)


@every_sharding
@on_ranks(2, 4)
def test_indices_of_parameters(options):
    parameters = make_parameters(9, (3, 5), 7, (2, 2))
    groups = [{"params": parameters[2:]}, {"params": parameters[:2]}]
    zero = ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=0.1, **options)
    order = [*parameters[2:], *parameters[:2]]
    assert [id(p) for p in zero._index_to_param] == [id(p) for p in order]
    assert [id(p) for p in zero._all_params] == [id(p) for p in order]
    assert [zero._param_to_index[p] for p in order] == [0, 1, 2, 3]
    assert set(zero._param_to_rank) == set(parameters)
    (extra,) = make_parameters(5)
    zero.add_param_group({"params": [extra]})
    assert zero._param_to_index[extra] == 4
    assert zero._index_to_param[4] is extra
    assert extra in zero._param_to_rank


@on_ranks(2, 4)
def test_partition_has_every_group_of_every_rank():
    parameters = make_parameters(9, (3, 5), 7, (2, 2))
    groups = [{"params": parameters[2:], "lr": 0.5}, {"params": parameters[:2]}]
    zero = ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=0.1)
    partition = zero._partition_parameters()
    assert len(partition) == dist.get_world_size()
    for rank, groups in enumerate(partition):
        assert [group["lr"] for group in groups] == [0.5, 0.1]
        for group in groups:
            assert all(zero._param_to_rank[p] == rank for p in group["params"])
    held = [p for groups in partition for group in groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in parameters}
    assert len(held) == len(parameters)
    for mine, local in zip(partition[zero.rank], zero.optim.param_groups, strict=True):
        assert [id(p) for p in mine["params"]] == [id(p) for p in local["params"]]


@ours
@on_ranks(2, 4)
def test_partition_by_element_lists_who_has_a_part():
    parameters = make_parameters(320, 16)
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1, sharding="element")
    partition = zero._partition_parameters()
    assert len(partition) == dist.get_world_size()
    for (group,) in partition:
        assert any(p is parameters[0] for p in group["params"])
    with_second = [rank for rank, (g,) in enumerate(partition) if len(g["params"]) == 2]
    assert len(with_second) == 1


@every_layout
@on_ranks(2, 4)
def test_local_step_is_the_update_without_the_exchange(options):
    twins = Twins(torch.optim.SGD, options=options)
    start = copies(twins.sharded)
    twins.set_gradients(0)
    twins.plain.step()
    assert twins.zero._local_step() is None
    # Each element is as before or as after the step; here, what this rank owns is updated.
    updated = 0
    for parameter, before, after in zip(twins.sharded, start, twins.unsharded, strict=True):
        assert bool(((parameter == before) | (parameter == after)).all())
        updated += int((parameter == after).sum())
    owned = sum(p.numel() for g in twins.zero.optim.param_groups for p in g["params"])
    assert updated == owned < sum(p.numel() for p in start)
    # The next step brings the others up to date.
    for parameter in (*twins.sharded, *twins.unsharded):
        parameter.grad = torch.zeros_like(parameter)
    twins.zero.step()
    twins.check()


@on_ranks(2)
def test_local_step_with_closure_and_keywords():
    twins = Twins(torch.optim.SGD)
    twins.set_gradients(0)
    assert twins.zero._local_step(closure=lambda: 2.5) == 2.5
    with pytest.raises((AssertionError, ValueError), match="gradients"):
        twins.zero._local_step(gradients=[p.grad for p in twins.sharded])


@ours
@every_sharding
@on_ranks(2)
def test_local_step_with_gradients(options):
    """One for each parameter that this rank owns; None: leave it alone."""
    parameters = make_parameters(9, (3, 5), 7, (2, 2))
    zero = ZeroRedundancyOptimizer(
        parameters, torch.optim.SGD, overlap_with_ddp=True, lr=0.1, **options
    )
    mine = zero._partition_parameters()[zero.rank][0]["params"]
    before = [p.detach().clone() for p in mine]
    gradients = [torch.ones_like(p) for p in mine]
    gradients[0] = None
    zero._local_step(gradients=gradients)
    assert torch.equal(mine[0], before[0])
    for parameter, start in zip(mine[1:], before[1:], strict=True):
        changed = (parameter == start - 0.1).sum()
        assert changed > 0
        if not options:
            assert changed == parameter.numel()


@on_ranks(2)
def test_sync_param_groups():
    zero = ZeroRedundancyOptimizer(make_parameters(9, 7), torch.optim.SGD, lr=0.1)
    source = [{"params": [1], "lr": 0.5, "extra": True}, {"params": [2], "lr": 0.25}]
    target = [{"params": [3], "lr": 0.1}, {"params": [4], "momentum": 0.9}]
    zero._sync_param_groups(source, target)
    assert target == [
        {"params": [3], "lr": 0.5, "extra": True},
        {"params": [4], "momentum": 0.9, "lr": 0.25},
    ]
    ZeroRedundancyOptimizer._sync_param_groups(source[:1], target[:1])  # a static method
    with pytest.raises((AssertionError, ValueError)):
        zero._sync_param_groups(source, target[:1])


@on_ranks(2)
def test_check_overlap_initialized_without_overlap():
    zero = ZeroRedundancyOptimizer(make_parameters(9, 7), torch.optim.SGD, lr=0.1)
    assert zero._check_overlap_initialized() is None


@ours
@on_ranks(2)
def test_overlap_needs_no_delayed_initialization():
    """Optimizer and partition are there from the start."""
    parameters = make_parameters(9, 7)
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, overlap_with_ddp=True, lr=0.1)
    assert zero._check_overlap_initialized() is None
    assert type(zero.optim) is torch.optim.Adam
    assert zero._overlap_info.status == zero_module._OverlapStatus.UNINITIALIZED
    assert zero._bucket_assignments_per_rank == [{}, {}]
    zero._init_zero_for_overlap()
    assert zero._overlap_info.status == zero_module._OverlapStatus.INITIALIZED
    assert {zero._param_to_rank[p] for p in parameters} == {0, 1}


@on_ranks(2)
def test_subclass_that_overrides_step():
    class Counted(ZeroRedundancyOptimizer):
        steps = 0

        def step(self, closure=None, **kwargs):
            self.steps += 1
            return super().step(closure, **kwargs)

    parameters = make_parameters(9, 7)
    others = copies(parameters)
    zero = Counted(parameters, torch.optim.SGD, lr=0.1)
    plain = torch.optim.SGD(others, lr=0.1)
    for number in range(2):
        set_gradients(parameters, number)
        set_gradients(others, number)
        zero.step()
        plain.step()
    assert zero.steps == 2
    assert_bitwise(parameters, others)
