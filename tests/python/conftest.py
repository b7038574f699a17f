"""Runs tests marked `full`, and all but n cases of those marked `part(n)`, only in
`make test FULL=1`; prints how many were skipped, and the seed.

On another device than the CPU (device.py), tests marked `cpu` are skipped, and the cases of others
that name an exchange for CPU tensors are left out. `--sample=n` runs n tests, chosen by the seed.

Tests that share a fixture of their module run on one worker, so that it is created once.
"""

import collections
import os
import random

os.environ.setdefault("SHARDSTEP_SEED", str(random.randrange(1 << 31)))  # workers inherit it

import device
import pytest
from full_run import FULL, SEED, sample

_left_out = 0
if device.NAME == "sim":
    import sim

    sim.activate()  # for tensors that come from ranks or files


def _for_a_full_run(items: list[pytest.Item]) -> set[pytest.Item]:
    out = {item for item in items if item.get_closest_marker("full")}
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("part") and item not in out:
            cases[item.parent, item.originalname].append(item)
    for some in cases.values():
        (count,) = some[0].get_closest_marker("part").args
        out.update(set(some) - set(sample(some, count)))
    return out


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", type=int, metavar="n", help="run n tests, chosen by the seed")


_CPU_EXCHANGES = {"pairwise", "shared_memory", "hierarchical"}


def _names_cpu_exchange(value: object) -> bool:
    if isinstance(value, dict):
        shares_memory = value.get("share_parameters", False)
        return shares_memory or _names_cpu_exchange(value.get("exchange"))
    return isinstance(value, str) and value in _CPU_EXCHANGES


def _choose_for_device(config: pytest.Config, items: list[pytest.Item]) -> None:
    if device.NAME != "cpu":
        items[:] = [
            item
            for item in items
            if not hasattr(item, "callspec")
            or not any(map(_names_cpu_exchange, item.callspec.params.values()))
        ]
    for item in items:
        if device.NAME != "cpu" and (cpu := item.get_closest_marker("cpu")):
            item.add_marker(pytest.mark.skip(reason=f"needs the CPU: {cpu.args[0]}"))
    if count := config.getoption("sample"):
        chosen = random.Random(SEED).sample(range(len(items)), min(count, len(items)))
        items[:] = [items[index] for index in sorted(chosen)]


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    global _left_out
    out = set() if FULL else _for_a_full_run(items)
    items[:] = [item for item in items if item not in out]
    _left_out = len(out)
    _choose_for_device(config, items)
    for item in items:
        if "module" in {d[-1].scope for d in item._fixtureinfo.name2fixturedefs.values() if d}:
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = _left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    global _left_out
    _left_out = getattr(node, "workeroutput", {}).get("left_out", _left_out)


def pytest_terminal_summary(terminalreporter) -> None:
    terminalreporter.write_line(f"seed: SHARDSTEP_SEED={SEED}")
    if _left_out:
        terminalreporter.write_line(f"left to FULL=1: {_left_out} tests")
