"""The examples that people copy, as they are."""

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_train_ddp import BUILD, LAUNCHER_VARIABLES

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# Stand for Slurm's commands on one node.
SCONTROL = "#!/bin/sh\necho 127.0.0.1\n"
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for rank in $(seq 0 $((SLURM_NTASKS - 1))); do
  SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & ranks+=($!)
done
for rank in "${ranks[@]}"; do wait "$rank" || exit 1; done
"""


def run_command(*command, cwd: Path, **variables: str) -> str:
    """What it prints."""
    environment = {k: v for k, v in os.environ.items() if not LAUNCHER_VARIABLES.match(k)}
    result = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**environment, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def run(*command, ranks: int = 2, cwd: Path = ROOT) -> str:
    """What a program prints under torchrun."""
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    return run_command(*launch, "--nproc-per-node", ranks, *command, cwd=cwd)


def free_port(first: int, end: int) -> int:
    for port in random.sample(range(first, end), 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port from {first} to {end}")


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_finetune_goes_on_where_it_was(tmp_path, dtype):
    options = ("--runs", tmp_path / "runs", "--every", 20, "--dtype", dtype)
    first = run(EXAMPLES / "finetune.py", *options, "--steps", 40)
    assert "from step 0 on 2 ranks" in first
    assert re.search(r"rank 0 of 2: step 20: .* per step", first)
    assert sorted(os.listdir(tmp_path / "runs")) == ["000020", "000040", "latest"]
    second = run(EXAMPLES / "finetune.py", *options, "--steps", 60, ranks=1)
    assert "from step 40 on 1 ranks" in second
    losses = losses_in(first + second)
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    # The weights of that run are where another starts.
    options = ("--runs", tmp_path / "more", "--weights", tmp_path / "runs" / "latest")
    third = run(EXAMPLES / "finetune.py", *options, "--steps", 1, "--dtype", dtype)
    assert losses_in(third)[0] < losses[0]


@pytest.mark.full
def test_the_slurm_script_trains_and_goes_on(tmp_path):
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_ID": str(free_port(20000, 40000) - 20000),
        "SLURM_NTASKS": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }
    submit = ("bash", EXAMPLES / "slurm.sh", "--every", 5, "--steps")
    assert "from step 0 on 2 ranks" in run_command(*submit, 5, cwd=ROOT, **variables)
    again = run_command(*submit, 10, cwd=ROOT, **variables)
    assert "from step 5 on 2 ranks" in again
    assert "step 10: loss" in again


@pytest.mark.full
def test_the_classifier_learns_and_goes_on_with_other_ranks(tmp_path):
    program = BUILD / "examples" / "classify_images"
    first = run("--no-python", program, "runs", 2, cwd=tmp_path)
    assert sorted(os.listdir(tmp_path / "runs")) == ["001", "002", "latest"]
    second = run("--no-python", program, "runs", 3, ranks=3, cwd=tmp_path)
    assert "going on after epoch 2" in second
    assert re.findall(r"^epoch (\d)", first + second, re.M) == ["1", "2", "3"]
    losses = losses_in(first + second)
    assert losses[2] < losses[1] < losses[0]
    right = [float(share) for share in re.findall(r"([\d.]+) % of the test", first + second)]
    assert right[-1] > 90


@pytest.mark.full
def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    cells = json.loads((EXAMPLES / "two_ranks.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "notebook.py").write_text("\n\n".join(code))
    printed = run_command(sys.executable, "notebook.py", cwd=tmp_path, MPLBACKEND="agg")
    found = re.findall(r"^(.*): loss ([\d.]+) -> ([\d.]+), ([\d.]+) MiB", printed, re.M)
    assert [way for way, *_ in found] == ["DDP", "stage 1", "stage 2"]
    assert len({last for _, _, last, _ in found}) == 1
    assert all(float(last) < float(first) for _, first, last, _ in found)
    memory = [float(size) for *_, size in found]
    assert memory[2] < memory[1] < memory[0]


@pytest.mark.full
def test_overlap_chart(tmp_path):
    picture = tmp_path / "overlap.png"
    printed = run(EXAMPLES / "overlap_chart.py", picture, "--layers", 3, "--width", 200)
    assert "one iteration" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_slurm_script_is_a_script():
    subprocess.run(["bash", "-n", str(EXAMPLES / "slurm.sh")], check=True, timeout=60)
