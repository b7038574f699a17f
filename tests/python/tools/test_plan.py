"""shardstep.plan() against formulas, and against the memory of ranks that train."""

import ctypes
import gc
import threading
from pathlib import Path

import pytest
import shardstep
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS = 1024, 32


def make_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


# Formulas


@pytest.mark.parametrize("world_size", [1, 2, 8, 64])
def test_bytes_per_parameter(world_size):
    """Adam has 8 bytes of state per parameter of 4 bytes."""
    million = 1_000_000
    plan = shardstep.plan(1000 * million, torch.optim.Adam)

    def bytes_per_parameter(method: str) -> float:
        memory = plan.row(method, world_size).memory
        return (memory.total - memory.in_flight) / (1000 * million)

    shared = 4 / min(world_size, 8)
    expected = {
        "ddp": 4 + 4 + 8,
        "torch_zero": 4 + 4 + 8 / world_size,
        "stage1": 4 + 4 + 8 / world_size,
        "stage2": 4 + (4 + 8) / world_size,
        "share_parameters": shared + (4 + 8) / world_size,
        "masters": 2 + (4 + 12) / world_size,
    }
    if world_size == 1:  # a group of one keeps whole gradients in .grad
        expected["masters"] = 2 + 2 + 12
    for method, value in expected.items():
        assert bytes_per_parameter(method) == pytest.approx(value, rel=1e-4), method


def test_traffic_per_step():
    """2 hosts of 2 ranks; psi bytes of parameters."""
    psi = 4e9
    plan = shardstep.plan(1e9, world_sizes=[2, 4], ranks_per_host=2)
    one_host = {m: plan.row(m, 2).traffic for m in ("ddp", "torch_zero", "stage1", "stage2")}
    assert [t.per_rank for t in one_host.values()] == [psi, 1.5 * psi, 1.5 * psi, psi]
    assert all(traffic.per_host == 0 for traffic in one_host.values())
    two_hosts = {m: plan.row(m, 4).traffic.per_host for m in ("ddp", "torch_zero", "stage2")}
    assert two_hosts == {"ddp": 1.5 * psi, "torch_zero": 2.5 * psi, "stage2": psi}
    narrow = shardstep.plan(1e9, ranks_per_host=2, gradient_dtype=torch.bfloat16)
    assert narrow.row("stage2", 4).traffic.per_host == 0.75 * psi


def test_time_is_compute_and_what_it_cannot_hide():
    psi, bandwidth = 4e9, 1e9
    plan = shardstep.plan(
        1e9, world_sizes=[4], ranks_per_host=2, network_bandwidth=bandwidth, compute_seconds=3.0
    )
    # The backward pass, 2 s, hides as much of the reduction.
    assert plan.row("ddp", 4).seconds == pytest.approx(3 + 1.5 * psi / bandwidth - 2)
    assert plan.row("stage2", 4).seconds == pytest.approx(3 + 0.5 * psi / bandwidth)
    assert plan.row("stage2", 2).seconds is None  # one host, whose bandwidth is unknown


def test_the_smallest_world_fits_and_the_next_smaller_does_not():
    plan = shardstep.plan(7e9, torch.optim.AdamW, memory_bytes=40 * 2**30)
    assert plan.smallest_world("ddp") is None
    for method in ("stage1", "stage2", "share_parameters", "masters"):
        world_size = plan.smallest_world(method)
        if world_size is None:
            assert plan.row(method, 1 << 16).memory.total > plan.memory_bytes
            continue
        assert plan.row(method, world_size).memory.total <= plan.memory_bytes
        assert plan.row(method, world_size - 1).memory.total > plan.memory_bytes
    assert plan.smallest_world("masters", 30 * 2**30) < plan.smallest_world("stage2", 30 * 2**30)


def test_a_module_on_the_meta_device_is_enough():
    with torch.device("meta"):
        huge = nn.Linear(200_000, 200_000)  # 160 GB
    plan = shardstep.plan(huge, torch.optim.SGD)
    assert plan.parameters == 200_000 * 200_001
    assert plan.row("ddp", 1).memory.state == 0
    momentum = shardstep.plan(huge, torch.optim.SGD, momentum=0.9, lr=0.1)
    assert momentum.row("ddp", 1).memory.state == 4 * plan.parameters


def test_what_a_model_can_be():
    def totals(model) -> list[float]:
        return [row.memory.total for row in shardstep.plan(model).rows]

    module = make_model()
    shapes = [tuple(param.shape) for param in module.parameters()]
    names = {name: param.shape for name, param in module.named_parameters()}
    assert totals(make_model) == totals(module) == totals(shapes) == totals(names)
    for wrong in ([], 0, 1.5, [object()]):
        with pytest.raises((TypeError, ValueError), match="shardstep: expected"):
            shardstep.plan(wrong)


def test_frozen_parameters_and_buffers_have_no_state():
    module = nn.Sequential(nn.Linear(10, 10, bias=False), nn.BatchNorm1d(10, affine=False))
    before = shardstep.plan(module).row("ddp", 1).memory
    assert (before.parameters, before.other) == (400, 10 * 4 + 10 * 4 + 8)
    module.add_module("frozen", nn.Linear(10, 10, bias=False).requires_grad_(False))
    after = shardstep.plan(module).row("ddp", 1).memory
    assert after.parameters == 800
    assert (after.gradients, after.state) == (before.gradients, before.state)


def test_by_parameter_the_largest_owner_counts():
    """Whole parameters of 9, 7, 5 and 3 million elements, twice, divide evenly over 2 ranks."""
    million = 1_000_000
    shapes = [(size * million,) for size in (9, 7, 5, 3)]
    plan = shardstep.plan(shapes * 2, torch.optim.SGD, momentum=0.9, lr=0.1)
    assert plan.row("stage1", 2).memory.state == 4 * 24 * million
    assert plan.row("stage1", 8).memory.state == 4 * 9 * million
    adafactor = shardstep.plan([(1000, 1000)], torch.optim.Adafactor)
    assert adafactor.row("ddp", 1).memory.state < 4 * 1000 * 1000 / 100


def test_table_json_and_picture(tmp_path):
    plan = shardstep.plan(make_model, memory_bytes=2**30, network_bandwidth=1e9)
    table = str(plan)
    assert "33.59 million parameters" in table
    for word in ("DDP", "torch's ZeRO", "stage 2, shared parameters", "masters", "1 rank"):
        assert word in table
    assert len(plan.as_dict()["rows"]) == 6 * 7
    plan.save_png(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


# Memory of ranks that train


def pss() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Pss")


def give_back_freed_memory() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class PeakMemory:
    """The largest proportional set size, sampled, since this was made."""

    def __init__(self) -> None:
        give_back_freed_memory()
        self._before = self._peak = pss()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self._peak = max(self._peak, pss())

    def __enter__(self) -> "PeakMemory":
        give_back_freed_memory()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def growth(self) -> int:
        return self._peak - self._before


def make_training(method: str):
    """The module to call and its optimizer."""
    module = make_model()
    options = {"lr": 1e-3, "fused": True}
    if method in ("ddp", "torch_zero", "stage1"):
        wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
        if method == "ddp":
            return wrapped, torch.optim.Adam(module.parameters(), **options)
        cls = (
            torch.distributed.optim.ZeroRedundancyOptimizer
            if method == "torch_zero"
            else shardstep.ZeroRedundancyOptimizer
        )
        return wrapped, cls(module.parameters(), torch.optim.Adam, **options)
    if method == "masters":
        module.bfloat16()
        options["master_dtype"] = torch.float32
    if method == "share_parameters":
        options["share_parameters"] = True
    return module, shardstep.ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.Adam, stage=2, sharding="element", **options
    )


def measure(method: str) -> int:
    nn.Linear(9, 9)(torch.ones(9)).sum().backward()  # loads what every program loads
    memory = PeakMemory()
    dist.barrier()
    module, optimizer = make_training(method)
    inputs = torch.randn(2, WIDTH, dtype=next(module.parameters()).dtype)

    def iterate() -> None:
        optimizer.zero_grad()
        module(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(2):  # DDP builds its buckets again after the first
        iterate()
    dist.barrier()
    with memory:
        for _ in range(3):
            iterate()
        dist.barrier()
    return memory.growth()


full = pytest.mark.full


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("ddp", marks=full),
        pytest.param("torch_zero", marks=full),
        "stage1",
        "stage2",
        pytest.param("share_parameters", marks=full),
        pytest.param("masters", marks=full),
    ],
)
def test_measured_memory_is_within_ten_per_cent(method):
    planned = shardstep.plan(make_model, torch.optim.Adam).row(method, 2).memory.total
    # Beside other load a rank may lag behind, and others hold more meanwhile: the least of three.
    measured = min(max(run_ranks(2, measure, method)) for _ in range(3))
    assert planned == pytest.approx(measured, rel=0.1)
