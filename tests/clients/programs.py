"""Starts the programs of this folder on 2 ranks."""

import os
import subprocess
import sys
from pathlib import Path

import torch

TOLERANCE = {"stage1": 0.0, "stage2": 1e-5}


def run(program: str, *arguments, folder: Path, ranks_itself: bool = False) -> list[dict]:
    """What each rank wrote as FOLDER/KIND.<rank>.pt. `arguments`: what to run, KIND, options."""
    what, kind, *options = arguments
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *([] if ranks_itself else torchrun)]
    command += [str(Path(__file__).with_name(program)), what, kind, str(folder), *options]
    settings = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TORCHDYNAMO_DISABLE": "1",  # torchao compiles its steps, which takes minutes
    }
    result = subprocess.run(
        command,
        env={**os.environ, **settings},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return [torch.load(folder / f"{kind}.{rank}.pt", weights_only=True) for rank in range(2)]


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
