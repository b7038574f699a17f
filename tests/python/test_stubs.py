"""The type stubs match the extension module."""

import subprocess
import sys
from pathlib import Path

import pytest

# pybind11's classes have a metaclass, and an __init__ where nothing makes them from Python.
PYBIND11 = ("metaclass differs", 'stub does not have *args parameter "args"')


@pytest.mark.full  # mypy reads all of torch's types; `make check-types` runs it too
def test_stubs_match_the_extension_module(tmp_path: Path) -> None:
    modules = ["shardstep._C", "shardstep._build_info"]
    result = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "--concise", *modules],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = [line for line in result.stdout.splitlines() if line.startswith("shardstep.")]
    assert found, result.stdout + result.stderr
    assert not [line for line in found if not line.endswith(PYBIND11)]
