"""Starts the programs of this folder on 2 ranks."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

TOLERANCE = {"stage1": 0.0, "stage2": 1e-5}


def run(program: str, what: str, *options, folder: Path, alone: bool = False) -> list[dict]:
    """What each rank wrote as FOLDER/<rank>.pt. `alone`: the program starts its ranks itself."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *([] if alone else torchrun)]
    command += [str(Path(__file__).with_name(program)), what, str(folder), *options]
    settings = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # or its ranks starve beside other work
        "TORCHDYNAMO_DISABLE": "1",  # torchao compiles its steps, which takes minutes
    }
    result = subprocess.run(
        command,
        env={**os.environ, **settings},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def run_once() -> Callable[..., list[dict]]:
    """Like run(), but a program runs only once, also if it fails."""
    made: dict = {}

    def get(*arguments, folder: Callable[[str], Path], alone: bool = False) -> list[dict]:
        if arguments not in made:
            try:
                made[arguments] = run(*arguments, folder=folder(arguments[1]), alone=alone)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                made[arguments] = error
        if isinstance(made[arguments], Exception):
            raise AssertionError(str(made[arguments]))
        return made[arguments]

    return get


def assert_same(found: dict, expected: dict, tolerance: float, what: str) -> None:
    """All tensors of all parts of a run."""
    assert found.keys() == expected.keys()
    for part, tensors in expected.items():
        assert found[part].keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(
                found[part][name],
                tensor,
                rtol=0,
                atol=tolerance,
                msg=lambda text, where=f"{name} of {what}, {part}": f"{where}: {text}",
            )
