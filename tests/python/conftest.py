"""Leaves tests marked `full` to `make test FULL=1`, and says how many and by which seed.

Tests that share a fixture of their module run on one worker, so that it is made once.
"""

import os
import random

os.environ.setdefault("SHARDSTEP_SEED", str(random.randrange(1 << 31)))  # workers inherit it

import pytest
from full_run import FULL, SEED

_left_out = 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    global _left_out
    out = [] if FULL else [item for item in items if item.get_closest_marker("full")]
    items[:] = [item for item in items if item not in out]
    _left_out = len(out)
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
