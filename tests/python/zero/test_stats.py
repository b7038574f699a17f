"""What users see of a step: the profiler's events, stats() and log lines."""

import logging
import os

import device as devices
import pytest
import torch
from helpers import ours
from implementation import ZeroRedundancyOptimizer
from ranks import run_ranks
from torch import nn

pytestmark = ours

ELEMENTS = 64 * 64 + 64
EXCHANGE = "shared_memory" if devices.NAME == "cpu" else "native"  # that stage 2 chooses


def make(**options):
    module = nn.Linear(64, 64)
    if options.get("overlap_forward"):
        options["module"] = module
    zero = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.Adam, sharding="element", lr=0.1, **options
    )
    return module, zero


def iterate(module, zero) -> None:
    zero.zero_grad()
    module(torch.ones(2, 64)).square().mean().backward()
    zero.step()


def stage2_stats() -> None:
    module, zero = make(stage=2)
    for _ in range(3):
        iterate(module, zero)
    stats = zero.stats()
    calls = {name: phase["calls"] for name, phase in stats["phases"].items()}
    assert calls == {"post": 3, "reduce": 3, "compare": 3, "update": 3, "gather": 3, "arrive": 0}
    assert all(phase["seconds"] > 0 for phase in stats["phases"].values() if phase["calls"])
    total = sum(phase["seconds"] for phase in stats["phases"].values())
    assert stats["seconds_waiting"] + stats["seconds_computing"] == pytest.approx(total)
    assert stats["exchange"] == EXCHANGE
    assert stats["buckets"] == 1
    assert stats["gradient_bytes"] == 4 * ELEMENTS / 2
    assert stats["state_bytes"] == pytest.approx(8 * ELEMENTS / 2, abs=64)
    if EXCHANGE == "shared_memory":
        assert stats["bytes_sent"] == 0  # nothing leaves the host
        assert stats["bytes_shared"] >= 3 * 4 * ELEMENTS / 2  # at least the half of the other rank
    zero.reset_stats()
    assert zero.stats()["bytes_sent"] == 0
    assert zero.stats()["bytes_shared"] == 0
    assert zero.stats()["seconds_waiting"] == 0
    iterate(module, zero)
    assert zero.stats()["phases"]["update"]["calls"] == 1


def test_stats_of_stage_2():
    run_ranks(2, stage2_stats)


def overlapping() -> None:
    module, zero = make(stage=2, overlap_forward=True)
    for _ in range(2):
        iterate(module, zero)
    zero.wait()
    assert zero.stats()["phases"]["arrive"]["calls"] >= 2
    flat = ZeroRedundancyOptimizer(
        [nn.Parameter(torch.ones(100))], torch.optim.SGD, lr=1, parameters_as_bucket_view=True
    )
    assert flat.stats()["flat_parameter_bytes"] == 400


def test_stats_of_other_options():
    run_ranks(2, overlapping)


def sends(exchange) -> None:
    module, zero = make(stage=2, exchange=exchange)
    for _ in range(3):
        iterate(module, zero)
    half = 4 * ELEMENTS / 2
    assert 3 * 2 * half <= zero.stats()["bytes_sent"] <= 1.1 * 3 * 2 * half
    zero.reset_stats()
    assert zero.stats()["bytes_sent"] == 0


@pytest.mark.parametrize("exchange", ["pairwise", "native"])
def test_bytes_sent(exchange):
    run_ranks(2, sends, exchange)


def between_hosts(hosts: str) -> dict[str, int]:
    os.environ["SHARDSTEP_TEST_HOSTS"] = hosts
    module = nn.Linear(512, 512)
    zero = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.Adam, stage=2, sharding="element", lr=0.1
    )
    zero.reset_stats()
    for _ in range(3):
        zero.zero_grad()
        module(torch.ones(2, 512)).square().mean().backward()
        zero.step()
    stats = zero.stats()
    assert stats["exchange"] == "hierarchical"
    return {name: stats[name] for name in ("bytes_sent", "bytes_received", "bytes_shared")}


@pytest.mark.cpu("tensors on a device go through the backend's collectives")
def test_bytes_between_hosts_and_inside_them():
    """2 hosts of 2 ranks: half the gradients and half the parameters leave each host per step."""
    hosts = "a,a,b,b"
    found = run_ranks(4, between_hosts, hosts)
    parameters = 4 * (512 * 512 + 512)
    for host in ("a", "b"):
        ranks = [stats for stats, name in zip(found, hosts.split(","), strict=True) if name == host]
        for name in ("bytes_sent", "bytes_received"):
            crossed = sum(stats[name] for stats in ranks) / 3
            assert parameters <= crossed <= 1.05 * parameters
        assert all(stats["bytes_shared"] > 0 for stats in ranks)


def profiled(options) -> set[str]:
    module, zero = make(**options)
    with torch.profiler.profile() as profile:
        for _ in range(2):
            iterate(module, zero)
    return {event.key for event in profile.key_averages() if event.key.startswith("shardstep::")}


@pytest.mark.parametrize(
    "options, phases",
    [
        ({"stage": 1}, ("compare", "update", "gather")),
        ({"stage": 2}, ("post", "reduce", "compare", "update", "gather")),
        (
            {"stage": 2, "overlap_forward": True},
            ("post", "reduce", "compare", "update", "gather", "arrive"),
        ),
    ],
    ids=["stage 1", "stage 2", "overlap_forward"],
)
def test_the_profiler_shows_each_phase(options, phases):
    for seen in run_ranks(2, profiled, options):
        assert seen == {f"shardstep::{phase}" for phase in phases}


def logged() -> list[str]:
    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logger = logging.getLogger("shardstep")
    logger.setLevel(logging.INFO)
    logger.addHandler(keep := Keep())
    module, zero = make(stage=2)
    handle = zero.log_stats(every=2)
    for _ in range(5):
        iterate(module, zero)
    handle.remove()
    for _ in range(2):
        iterate(module, zero)
    logger.removeHandler(keep)
    with pytest.raises(ValueError, match="expected a line per 1 step or more, got 0"):
        zero.log_stats(every=0)
    return lines


def test_a_line_per_n_steps():
    for rank, lines in enumerate(run_ranks(2, logged)):
        assert [line.split(" ms")[0].rpartition(":")[0] for line in lines] == [
            f"rank {rank} of 2: step 2",
            f"rank {rank} of 2: step 4",
        ]
        for word in ("update", "gather", f"by {EXCHANGE}", "state"):
            assert word in lines[0]
