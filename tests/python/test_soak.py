"""tools/soak.py: what it takes for a failure, and a short soak in a full run."""

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("SHARDSTEP_BUILD_DIR", "build")


def load():
    spec = importlib.util.spec_from_file_location("soak", ROOT / "tools" / "soak.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # for its dataclass
    spec.loader.exec_module(module)
    return module


soak = load()


class Ended:
    """A run of two ranks that has ended."""

    ranks = 2

    def __init__(self, losses, codes):
        self._losses = losses
        self.processes = [argparse.Namespace(returncode=code) for code in codes]

    def losses(self):
        return self._losses


@pytest.fixture
def judge(tmp_path, monkeypatch):
    monkeypatch.setattr(soak.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    one = soak.Soak(argparse.Namespace(build=BUILD, minutes=1, seed=1))
    one.reference[2] = {step: 4 - step / 100 for step in range(1, soak.STEPS + 1)}

    def judge(steps, codes=(0, 0), saved=0, exact=True, off=0.0):
        losses = {step: one.reference[2][step] + off for step in steps}
        return one.judge(Ended(losses, codes), saved, "kill", exact)

    return judge


def test_the_same_losses_pass(judge):
    assert judge(range(1, 11)) == 10
    assert judge(range(1, 11), off=0.01, exact=False) == 10


@pytest.mark.parametrize(("off", "exact"), [(1e-9, True), (0.03, False)])
def test_another_loss_is_a_failure(judge, off, exact):
    with pytest.raises(soak.SoakError, match="expected a loss"):
        judge(range(1, 11), off=off, exact=exact)


def test_a_run_that_begins_too_early_is_a_failure(judge):
    with pytest.raises(soak.SoakError, match="go on after step 7"):
        judge(range(1, 11), saved=7)


def test_a_crash_is_a_failure(judge):
    with pytest.raises(soak.SoakError, match="rank 1 ended with -11"):
        judge(range(1, 11), codes=(1, -11))


@pytest.mark.parametrize(("last", "saved"), [(6, 0), (7, 0), (8, 0), (14, 0), (15, 7), (22, 14)])
def test_the_save_before_the_last_must_be_there(judge, last, saved):
    assert judge(range(1, last + 1), codes=(1, -9)) == saved


@pytest.mark.full
def test_a_short_soak():
    program = [sys.executable, str(ROOT / "tools" / "soak.py"), "--minutes", "0.5"]
    ended = subprocess.run(
        [*program, "--build", str(BUILD)], capture_output=True, text=True, timeout=900
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "largest difference" in ended.stdout
