"""examples/finetune_lightning.py, as it is."""

import os
import re
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "finetune_lightning.py"


def run(runs: Path, steps: int) -> float:
    """The last loss."""
    command = [sys.executable, str(PROGRAM), "--runs", str(runs), "--every", "20"]
    result = subprocess.run(
        [*command, "--steps", str(steps)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=runs.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    (loss,) = re.findall(rf"^step {steps}: loss ([\d.]+)$", result.stdout, re.M)
    return float(loss)


def test_trains_and_goes_on(tmp_path):
    first = run(tmp_path / "runs", 20)
    assert (tmp_path / "runs" / "last.ckpt").exists()
    assert run(tmp_path / "runs", 60) < first
