"""The examples that people copy, as they are."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_train_ddp import LAUNCHER_VARIABLES

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(script: str, *arguments, ranks: int = 2) -> str:
    """What two ranks print."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    variables = {k: v for k, v in os.environ.items() if not LAUNCHER_VARIABLES.match(k)}
    result = subprocess.run(
        [*launch, "--nproc-per-node", str(ranks), str(EXAMPLES / script), *map(str, arguments)],
        env={**variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


@pytest.mark.full
def test_finetune_goes_on_where_it_was(tmp_path):
    options = ("--runs", tmp_path / "runs", "--every", 20)
    first = run("finetune.py", *options, "--steps", 40)
    assert "from step 0 on 2 ranks" in first
    assert re.search(r"rank 0 of 2: step 20: .* per step", first)
    assert sorted(os.listdir(tmp_path / "runs")) == ["000020", "000040", "latest"]
    second = run("finetune.py", *options, "--steps", 60, ranks=1)
    assert "from step 40 on 1 ranks" in second
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", first + second)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


@pytest.mark.full
def test_overlap_chart(tmp_path):
    picture = tmp_path / "overlap.png"
    assert "one iteration" in run("overlap_chart.py", picture, "--layers", 3, "--width", 200)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_slurm_script_is_a_script():
    subprocess.run(["bash", "-n", str(EXAMPLES / "slurm.sh")], check=True, timeout=60)
