"""Trains the example in stage 2 through accidents, and compares it with runs that had none.

One episode is a training of build/examples/train_gpt that is killed, stopped, delayed and restarted
until its last step, with saves in the background. Every run of it has another sharding, and in half
of the episodes another number of ranks. Checked are:

- each loss of each run: to the bit where the number of ranks stays the same, else within
  TOLERANCE, because the number of ranks changes the order in which gradients are summed;
- that the ranks that were not killed end by an error soon, and do not hang; without one end only
  those that have made the last step, which none does before rank 0 has logged it;
- that a run goes on from the last checkpoint that had to be complete, or a later one;
- that a run which makes the last save leaves nothing but that checkpoint.

The seed, which --seed repeats, decides what happens to whom and after which step; how far the
others are at that moment is up to the machine. The minutes begin after the runs without accidents,
with which the others are compared.
"""

import argparse
import csv
import dataclasses
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RANKS = (1, 2, 3, 4)
EVERY = 7  # steps from one save to the next
STEPS = 140
OPTIONS = {"layers": 1, "width": 64, "heads": 2, "context": 32, "batch": 12, "stage": 2}
# Of a loss that falls from 4 to 2.5, by 1e-2 in a step; so a step that is lost or made twice shows.
# Measured, between numbers of ranks that change in a training, was at most 2e-4.
TOLERANCE = 2e-3
PATIENCE = 90  # seconds in which ranks end after an accident; far less than the timeout
LAUNCHER = re.compile("^(RANK|WORLD_SIZE|LOCAL_|MASTER_|OMPI_|PMI|SLURM_|TORCHELASTIC_)")


class SoakError(Exception):
    """Something that should not have happened; the folder of the run is kept."""


@dataclasses.dataclass
class Counts:
    runs: int = 0
    kills: int = 0
    power_cuts: int = 0
    interrupts: int = 0
    delays: int = 0
    steps: int = 0
    episodes: int = 0
    difference: float = 0.0

    def line(self) -> str:
        return (
            f"{self.episodes} episodes, {self.runs} runs, {self.steps} steps compared, "
            f"{self.kills} ranks killed, {self.power_cuts} times all of them, "
            f"{self.interrupts} interrupts, {self.delays} delays; "
            f"largest difference {self.difference:.1e}"
        )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Run:
    """The ranks of one training, as processes, and the losses that rank 0 has logged so far."""

    def __init__(self, program: Path, folder: Path, ranks: int, sharding: str, checkpoint: bool):
        self.folder, self.ranks = folder, ranks
        self.victim: int | None = None  # the rank that was killed alone
        self.log = folder / "loss.csv"
        self.log.unlink(missing_ok=True)
        options = OPTIONS | {"steps": STEPS, "every": EVERY, "sharding": sharding}
        options |= {"log": self.log} | ({"checkpoint": folder / "checkpoint"} if checkpoint else {})
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        clean = {k: v for k, v in os.environ.items() if not LAUNCHER.match(k)}
        clean |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        clean |= {"MASTER_PORT": str(free_port())}
        self.processes = []
        for rank in range(ranks):
            with open(self.output(rank), "w") as output:
                self.processes.append(
                    subprocess.Popen(
                        [str(program), *words],
                        env=clean | {"RANK": str(rank)},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )

    def output(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.txt"

    def losses(self) -> dict[int, float]:
        """By step. The last line may not be whole when rank 0 was killed."""
        if not self.log.exists():
            return {}
        text = self.log.read_text()
        rows = csv.reader(text[: text.rfind("\n") + 1].splitlines()[1:])
        return {int(step): float(loss) for step, loss in rows}

    def has_met(self) -> bool:
        """Whether the ranks are connected: before, a rank waits for others until the timeout."""
        return self.output(0).stat().st_size > 0

    def last_step(self) -> int:
        """The last step that was made, by this run or before it; 0 if none is known."""
        done = re.search(r"^resuming after step (\d+)$", self.output(0).read_text(), re.M)
        return max(self.losses(), default=int(done[1]) if done else 0)

    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def wait(self, seconds: float) -> bool:
        """Whether all ranks have ended in time."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            try:
                process.wait(timeout=max(0.01, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def said(self) -> str:
        return "\n".join(
            f"rank {rank}, exit status {process.poll()}:\n{self.output(rank).read_text()[-3000:]}"
            for rank, process in enumerate(self.processes)
        )


class Soak:
    def __init__(self, arguments: argparse.Namespace):
        self.program = arguments.build.resolve() / "examples" / "train_gpt"
        self.random = random.Random(arguments.seed)
        self.minutes = arguments.minutes
        self.began = time.monotonic()
        self.counts = Counts()
        self.folder = Path(tempfile.mkdtemp(prefix="shardstep_soak_"))
        self.reference: dict[int, dict[int, float]] = {}

    def progress(self, doing: str) -> None:
        minutes = (time.monotonic() - self.began) / 60
        print(f"{minutes:5.1f} min  {doing}: {self.counts.line()}", flush=True)

    def uninterrupted(self, ranks: int) -> dict[int, float]:
        if ranks not in self.reference:
            run = Run(self.program, self.fresh("reference"), ranks, "element", checkpoint=False)
            if not run.wait(1200) or any(process.returncode for process in run.processes):
                said = run.said()
                run.close()
                raise SoakError(f"a run of {ranks} ranks without accidents failed:\n{said}")
            losses = run.losses()
            if len(losses) != STEPS or not all(math.isfinite(loss) for loss in losses.values()):
                raise SoakError(
                    f"expected {STEPS} finite losses of a run of {ranks} ranks without accidents, "
                    f"got {losses}"
                )
            self.reference[ranks] = losses
        return self.reference[ranks]

    def fresh(self, name: str) -> Path:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def episode(self, exact: bool) -> None:
        """One training, from its first step to its last."""
        folder = self.fresh("episode")
        ranks, saved = self.random.choice(RANKS), 0
        while saved < STEPS:
            if not exact:
                ranks = self.random.choice(RANKS)
            saved = self.one_run(folder, ranks, saved, exact)
        self.counts.episodes += 1
        self.progress("same ranks" if exact else "other ranks")

    def one_run(self, folder: Path, ranks: int, saved: int, exact: bool) -> int:
        """Returns after how many steps the next run has to go on, at least."""
        sharding = self.random.choice(("element", "parameter"))
        run = Run(self.program, folder, ranks, sharding, checkpoint=True)
        self.counts.runs += 1
        try:
            accident = self.disturb(run, saved)
            if not run.wait(1200 if accident == "none" else PATIENCE):
                raise SoakError(f"ranks did not end within {PATIENCE} s of: {accident}")
            return self.judge(run, saved, accident, exact)
        except SoakError as error:
            raise SoakError(f"{error}\n{run.said()}") from None
        finally:
            run.close()

    def disturb(self, run: Run, saved: int) -> str:
        """Delays ranks until some step; then there may be an accident."""
        kinds = ("kill", "kill", "kill", "power cut", "interrupt", "none")
        accident = self.random.choice(kinds)
        last = self.random.randint(saved, min(STEPS - 1, saved + 60))
        early = self.random.random() < 0.15  # perhaps before the ranks have met
        moment = time.monotonic() + self.random.random() * 2
        while not run.ended():
            step = max(run.losses(), default=0)
            if accident != "none" and (step > last or (early and time.monotonic() > moment)):
                break
            time.sleep(self.random.random() * 0.2)
            if self.random.random() < 0.2:
                self.delay(self.random.choice(run.processes))
        if accident == "interrupt" and early:
            accident = "none"  # before the example listens, it ends the process
        if accident == "kill" and not run.has_met():
            accident = "power cut"  # as a launcher does, which ends all if one dies
        if accident == "kill":
            run.victim = self.random.randrange(run.ranks)
            run.processes[run.victim].kill()
            self.counts.kills += 1
        elif accident == "power cut":
            for process in run.processes:
                process.kill()
            self.counts.power_cuts += 1
        elif accident == "interrupt":
            run.processes[0].send_signal(signal.SIGINT)
            self.counts.interrupts += 1
        return accident

    def delay(self, process: "subprocess.Popen[bytes]") -> None:
        if process.poll() is not None:
            return
        process.send_signal(signal.SIGSTOP)
        time.sleep(self.random.random() * 0.4)
        process.send_signal(signal.SIGCONT)
        self.counts.delays += 1

    def judge_endings(self, run: Run, accident: str) -> None:
        """Checks how each rank has ended."""
        killed = -signal.SIGKILL
        for rank, process in enumerate(run.processes):
            ending = process.returncode
            if ending == 0 and (accident == "interrupt" or run.last_step() == STEPS):
                continue
            expected: tuple[int, ...] = ()
            if accident == "power cut":  # some may notice the death of others before their own
                expected = (1, killed)
            elif accident == "kill":
                expected = (killed,) if rank == run.victim else (1,)
            if ending not in expected:
                raise SoakError(
                    f"rank {rank} ended with {ending} after: {accident}, "
                    f"when {run.last_step()} of {STEPS} steps were made"
                )

    def judge(self, run: Run, saved: int, accident: str, exact: bool) -> int:
        """Checks the losses and where the run has begun; returns where the next must, at least."""
        self.judge_endings(run, accident)
        losses = run.losses()
        expected = self.uninterrupted(run.ranks)
        self.counts.steps += len(losses)
        for step, loss in losses.items():
            difference = abs(loss - expected[step])
            if not difference <= (0 if exact else TOLERANCE):  # of NaN, nothing is true
                raise SoakError(f"step {step}: expected a loss of {expected[step]}, got {loss}")
            self.counts.difference = max(self.counts.difference, difference)
        ended_well = all(process.returncode == 0 for process in run.processes)
        if not losses:
            # The last run may have been killed after its last save.
            return run.last_step() if ended_well else saved
        first, last = min(losses), max(losses)
        if first <= saved:
            raise SoakError(f"expected the run to go on after step {saved}, it began with {first}")
        if ended_well and last == STEPS:
            left = sorted(path.name for path in (run.folder / "checkpoint").iterdir())
            if len([name for name in left if name.endswith(".safetensors")]) + 1 != len(left):
                raise SoakError(f"more than the last checkpoint is left: {left}")
        if ended_well:
            return last  # the last save has ended
        # A save begins after its step was logged, and waits for the one before.
        return max(first - 1, ((last - 1) // EVERY - 1) * EVERY)

    def run(self) -> int:
        try:
            for ranks in RANKS:
                self.uninterrupted(ranks)
                self.progress(f"reference of {ranks} ranks")
            exact = True
            end = time.monotonic() + 60 * self.minutes
            while time.monotonic() < end:
                self.episode(exact)
                exact = not exact
            if self.counts.episodes == 0 or self.counts.steps == 0:
                raise SoakError("nothing was compared; expected --minutes to be larger")
        except SoakError as error:
            print(f"failed, see {self.folder}: {error}")
            self.progress("failed")
            return 1
        shutil.rmtree(self.folder)
        self.progress("passed")
        return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--minutes", type=float, default=10, help="after the runs to compare with")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    arguments = parser.parse_args()
    print(f"soaking for {arguments.minutes:g} minutes; --seed {arguments.seed} repeats the choices")
    return Soak(arguments).run()


if __name__ == "__main__":
    sys.exit(main())
