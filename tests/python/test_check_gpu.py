"""Runs examples/check_gpu.py on the CPU and on the simulated device."""

import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "check_gpu.py"


def check_here(name: str, tolerance: float) -> tuple[int, str]:
    spec = importlib.util.spec_from_file_location("check_gpu", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    sys.modules["check_gpu"] = script
    spec.loader.exec_module(script)
    device = torch.device(name) if name == "cpu" else torch.device(name, torch.sim.current_device())
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        failed = script.compare_all(device, tolerance)
    return failed, output.getvalue()


@pytest.mark.parametrize("device", ["sim", pytest.param("cpu", marks=pytest.mark.full)])
def test_the_verdict_is_that_it_works(device):
    (failed, output), (_, others) = run_ranks(2, check_here, device, 1e-4, device=device)
    assert failed == 0, output
    assert re.search(r"verdict: shardstep works here: (\d+) of \1 checks agree", output)
    assert not others


@pytest.mark.full
def test_a_difference_is_a_failure():
    failed, output = run_ranks(2, check_here, "sim", -1.0, device="sim")[0]
    assert failed > 0
    assert "does NOT work here" in output
    assert "rank 1: parameters differ by" in output


@pytest.mark.full
def test_it_runs_alone():
    launched = re.compile("^(RANK|WORLD_SIZE|LOCAL_|MASTER_|TORCHELASTIC_)")
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu"],
        env={k: v for k, v in os.environ.items() if not launched.match(k)},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 ranks on cpu" in run.stdout
