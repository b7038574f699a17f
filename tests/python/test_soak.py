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

    def __init__(self, losses, codes, victim, resumed=0):
        self._losses, self.victim = losses, victim
        self._resumed = resumed
        self.processes = [argparse.Namespace(returncode=code) for code in codes]

    def losses(self):
        return self._losses

    def last_step(self):
        return max(self._losses, default=self._resumed)


@pytest.fixture
def judge(tmp_path, monkeypatch):
    monkeypatch.setattr(soak.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    one = soak.Soak(argparse.Namespace(build=BUILD, minutes=1, seed=1))
    one.reference[2] = {step: 4 - step / 100 for step in range(1, soak.STEPS + 1)}

    def judge(steps, codes=(1, -9), saved=0, exact=True, off=0.0, accident="kill", resumed=0):
        losses = {step: one.reference[2][step] + off for step in steps}
        run = Ended(losses, codes, victim=1, resumed=resumed)
        run.folder = tmp_path
        return one.judge(run, saved, accident, exact)

    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "index.json").touch()
    return judge


def test_the_same_losses_pass(judge):
    stopped = {"codes": (0, 0), "accident": "interrupt"}
    assert judge(range(1, 11), **stopped) == 10
    assert judge(range(1, 11), off=1e-4, exact=False, **stopped) == 10


@pytest.mark.parametrize(
    ("off", "exact"),
    [(1e-9, True), (3e-3, False), *((float(x), e) for x in ("nan", "inf") for e in (True, False))],
)
def test_another_loss_is_a_failure(judge, off, exact):
    with pytest.raises(soak.SoakError, match="expected a loss"):
        judge(range(1, 11), off=off, exact=exact)


def test_a_run_that_begins_too_early_is_a_failure(judge):
    with pytest.raises(soak.SoakError, match="go on after step 7"):
        judge(range(1, 11), saved=7)


def test_a_crash_is_a_failure(judge):
    with pytest.raises(soak.SoakError, match="rank 1 ended with -11"):
        judge(range(1, 11), codes=(1, -11))


@pytest.mark.parametrize(
    ("codes", "accident"),
    [
        ((0, -9), "kill"),  # as if nothing had happened
        ((-9, -9), "kill"),  # nobody killed rank 0
        ((1, 1), "kill"),  # rank 1 had failed before it was killed
        ((1, 0), "kill"),
        ((0, -9), "power cut"),
        ((0, 0), "none"),
        ((1, 0), "interrupt"),
    ],
)
@pytest.mark.parametrize("steps", [range(1, 11), ()])
def test_a_rank_that_ends_otherwise_than_its_accident_says_is_a_failure(
    judge, codes, accident, steps
):
    with pytest.raises(soak.SoakError, match=r"rank \d ended with"):
        judge(steps, codes=codes, accident=accident)


def test_ranks_that_have_made_the_last_step_end_as_they_like(judge):
    for codes in ((0, -9), (1, -9), (0, 0)):
        judge(range(1, soak.STEPS + 1), codes=codes)
    assert judge((), codes=(0, 0), accident="none", resumed=soak.STEPS) == soak.STEPS
    judge(range(1, 11), codes=(1, -9), accident="power cut")


def test_the_last_step_is_the_last_one_logged_or_resumed_after(tmp_path):
    run = object.__new__(soak.Run)
    run.folder, run.log = tmp_path, tmp_path / "loss.csv"
    run.output(0).write_text("9 parameters\n")
    assert run.last_step() == 0
    run.output(0).write_text("9 parameters\nresuming after step 140\n")
    assert run.last_step() == 140
    run.log.write_text("step,loss\n141,2.5\n142,2")
    assert run.last_step() == 141


def soak_without_ranks(monkeypatch, minutes, losses):
    """Runs that log these losses at once."""

    class Logged:
        processes = ()

        def __init__(self, *arguments, **named):
            pass

        def wait(self, seconds):
            return True

        def losses(self):
            return losses

    monkeypatch.setattr(soak, "Run", Logged)
    return soak.Soak(argparse.Namespace(build=BUILD, minutes=minutes, seed=1)).run()


def test_a_soak_that_compares_nothing_is_a_failure(monkeypatch, capsys):
    losses = {step: 1.0 for step in range(1, soak.STEPS + 1)}
    assert soak_without_ranks(monkeypatch, 0, losses) == 1
    assert "nothing was compared" in capsys.readouterr().out


@pytest.mark.parametrize("losses", [{}, {s: float("nan") for s in range(1, soak.STEPS + 1)}])
def test_a_comparison_with_no_numbers_is_a_failure(monkeypatch, capsys, losses):
    assert soak_without_ranks(monkeypatch, 0, losses) == 1
    assert "finite losses" in capsys.readouterr().out


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
