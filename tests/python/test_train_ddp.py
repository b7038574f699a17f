"""Runs build/examples/train_ddp, README's program, under torchrun and alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("SHARDSTEP_BUILD_DIR", "build")
PROGRAM = BUILD / "examples" / "train_ddp"
LAUNCHER_VARIABLES = re.compile(
    "^(RANK|WORLD_SIZE|LOCAL_|MASTER_|OMPI_|PMI|SLURM_|TORCHELASTIC_|OMP_NUM_THREADS)"
)


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_learns_and_saves(tmp_path, ranks):
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={ranks}", "--no-python"),
    ]
    run = subprocess.run(
        [*(torchrun if ranks > 1 else []), str(PROGRAM)],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if not LAUNCHER_VARIABLES.match(k)},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    losses = [float(x) for x in re.findall(r"^batch \d+: loss (\S+)$", run.stdout, re.M)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2
    assert (tmp_path / "model.pt").exists()
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)["state"]
    assert [values["step"] for values in state.values()] == [100 + 10 * (ranks - 1)] * 4
