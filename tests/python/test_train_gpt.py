"""Runs build/examples/train_gpt as a user would: real processes, real files, a real terminal."""

import contextlib
import csv
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("SHARDSTEP_BUILD_DIR", "build")
PROGRAM = BUILD / "examples" / "train_gpt"
TINY = {"layers": 1, "width": 32, "heads": 2, "context": 16, "batch": 8, "steps": 30}
OPTIONS = {
    *TINY,
    *("ranks", "optimizer", "lr", "seed", "text", "sharding", "log", "help"),
    *("checkpoint", "every"),
}
LAUNCHER_VARIABLES = re.compile(
    "^(RANK|WORLD_SIZE|LOCAL_|MASTER_|OMPI_|PMI|SLURM_|TORCHELASTIC_|OMP_NUM_THREADS)"
)
LIMIT = 120  # seconds; a tiny run takes about three


def environment():
    return {k: v for k, v in os.environ.items() if not LAUNCHER_VARIABLES.match(k)}


def flags(options):
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def train(*arguments, prefix=(), launcher=None):
    return subprocess.run(
        [*prefix, str(PROGRAM), *map(str, arguments)],
        env=environment() | (launcher or {}),
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def losses_of(log):
    with open(log, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    return [float(row["loss"]) for row in rows]


def table_of(output):
    """The last table: name -> [optimizer state, parameters, gradients, peak], in bytes or None."""
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    lines = output[output.rindex("optimizer state") :].splitlines()[1:]
    table = {}
    for line in lines:
        cells = [cell.strip() for cell in re.split(r"\s{2,}", line.strip())]
        sizes = [None if c == "-" else float(c.split()[0]) * units[c.split()[1]] for c in cells[1:]]
        assert len(sizes) == 4, line
        table[cells[0]] = sizes
    return table


def run_to_losses(tmp_path, name, *arguments, prefix=()):
    log = tmp_path / f"{name}.csv"
    result = train(*flags(TINY), *arguments, "--log", log, prefix=prefix)
    assert result.returncode == 0, result.stderr
    return losses_of(log), result.stdout


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return {
        optimizer: run_to_losses(
            tmp_path_factory.mktemp("one"),
            optimizer,
            "--ranks",
            1,
            "--optimizer",
            optimizer,
        )
        for optimizer in ("adamw", "sgd")
    }


# The batches are the same. The sums are not taken in the same order: a rank takes the mean over its
# rows, then the ranks' means are averaged, a few ulp a gradient. AdamW may blow that up where a
# gradient is nearly zero, because it divides by the gradient's own size. Seen: 5e-7.
TOLERANCE = 1e-5


@pytest.mark.parametrize(
    "ranks, sharding, optimizer",
    [
        (2, "parameter", "sgd"),
        (2, "parameter", "adamw"),
        (2, "element", "sgd"),
        (2, "element", "adamw"),
        (4, "element", "adamw"),
    ],
)
def test_losses_equal_those_of_one_process(tmp_path, one_process, ranks, sharding, optimizer):
    expected, _ = one_process[optimizer]
    losses, _ = run_to_losses(
        tmp_path,
        "many",
        "--ranks",
        ranks,
        "--sharding",
        sharding,
        "--optimizer",
        optimizer,
    )
    assert len(losses) == 30
    assert losses == pytest.approx(expected, abs=TOLERANCE)


def test_loss_falls(one_process):
    losses, _ = one_process["adamw"]
    assert losses[0] > 3.5
    assert max(losses[-5:]) < losses[0] - 0.5


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "adagrad", "rmsprop"])
def test_every_optimizer_learns_and_is_sharded(tmp_path, optimizer):
    losses, output = run_to_losses(tmp_path, optimizer, "--optimizer", optimizer)
    assert losses[-1] < losses[0] - 0.1
    table = table_of(output)
    assert list(table) == ["rank 0", "rank 1", "replicated (computed)"]
    state, parameters, gradients, peak = table.pop("replicated (computed)")
    assert state == pytest.approx(parameters * (2 if "adam" in optimizer else 1), rel=0.01)
    assert peak is None
    for rank in table.values():
        # By element the halves are equal, but for padding and step counters.
        assert rank[0] == pytest.approx(state / 2, rel=0.05)
        assert rank[1:3] == [parameters, gradients]
        assert rank[3] > 10 * 2**20
    assert sum(rank[0] for rank in table.values()) == pytest.approx(state, rel=0.05)


def test_state_by_parameter_is_about_half(tmp_path):
    _, output = run_to_losses(tmp_path, "parameter", "--sharding", "parameter")
    table = table_of(output)
    for rank in ("rank 0", "rank 1"):
        assert table[rank][0] == pytest.approx(table["replicated (computed)"][0] / 2, rel=0.2)


def test_under_torchrun(tmp_path, one_process):
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    torchrun += ["--standalone", "--no-python", "--nproc-per-node", "2"]
    torchrun += ["--"]  # else torchrun takes --log for one of its own options
    losses, output = run_to_losses(tmp_path, "torchrun", prefix=torchrun)
    assert losses == pytest.approx(one_process["adamw"][0], abs=TOLERANCE)
    assert "rank 1" in table_of(output)


def test_plain_output_has_no_control_characters(one_process):
    _, output = one_process["adamw"]
    assert re.search(
        r"^step +1/30 +loss \d+\.\d+ +\d+ tokens/s +ETA \d+:\d\d$", output, re.MULTILINE
    )
    assert not re.search(r"[^\n\x20-\x7e]", output)
    assert "sample" in output


def test_same_seed_same_run_other_seed_other_run(tmp_path, one_process):
    again, _ = run_to_losses(tmp_path, "again", "--ranks", 1)
    other, _ = run_to_losses(tmp_path, "other", "--ranks", 1, "--seed", 2)
    assert again == one_process["adamw"][0]
    assert other != again


def test_terminal_shows_the_bar():
    output, code = run_in_terminal(*flags(TINY))
    assert code == 0
    assert re.search(r"\r\[[#.]+\] step +1/30 +loss \d+\.\d+ +\d+ tokens/s +ETA \d+:\d\d", output)
    assert re.search(r"\r\[#+\] step 30/30", output)
    assert "rank 1" in output


def run_in_terminal(*arguments):
    """What the program writes to a pseudo-terminal, and its exit code."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [str(PROGRAM), *arguments], env=environment(), stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        output, deadline = b"", time.monotonic() + LIMIT
        try:
            while select.select([ours], [], [], max(0, deadline - time.monotonic()))[0]:
                try:
                    output += os.read(ours, 4096)
                except OSError:  # the last writer has closed it
                    break
            code = process.wait(max(0, deadline - time.monotonic()))
        finally:
            process.kill()
            os.close(ours)
    return output.decode(), code


def test_help_lists_every_option():
    result = train("--help")
    assert result.returncode == 0
    listed = re.findall(r"^  --(\w+)", result.stdout, re.MULTILINE)
    assert len(listed) == len(OPTIONS)
    assert set(listed) == OPTIONS


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("--colour red", "got '--colour'"),
        ("-x", "got '-x'"),
        ("train", "expected only options, got 'train'"),
        ("--steps", "--steps: expected a value"),
        ("--steps 0", "--steps: expected a whole number from 1"),
        ("--steps 10x", "got '10x'"),
        ("--layers -1", "got '-1'"),
        ("--ranks 0", "--ranks: expected a whole number from 1"),
        ("--lr nan", "--lr: expected a positive number"),
        ("--lr 0", "--lr: expected a positive number"),
        ("--seed -1", "--seed: expected"),
        ("--optimizer lion", "one of adamw, adam, sgd, adagrad, rmsprop, got 'lion'"),
        ("--sharding row", "one of parameter, element, got 'row'"),
        ("--width 30 --heads 4", "--width: expected a multiple of --heads 4, got '30'"),
        ("--batch 7", "--batch: expected a multiple of the 2 ranks, got '7'"),
        ("--text /nowhere/text", "No such file"),
        ("--log /nowhere/log.csv", "--log: expected a file that can be written"),
    ],
)
def test_bad_options(arguments, expected):
    result = train(*arguments.split())
    assert result.returncode == 2
    assert expected in result.stderr
    assert result.stdout == ""


def test_ranks_that_the_launcher_did_not_start():
    launched = {"RANK": "0", "WORLD_SIZE": "1"}
    result = train("--ranks", 2, launcher=launched)
    assert result.returncode == 2
    assert "--ranks: expected what the launcher started, 1, got '2'" in result.stderr


@pytest.mark.parametrize("length", [0, 16])
def test_text_shorter_than_the_context(tmp_path, length):
    text = tmp_path / "short.txt"
    text.write_text("x" * length)
    result = train(*flags(TINY), "--text", text)
    assert result.returncode == 2
    assert f"at least --context + 1 = 17 characters, got {length}" in result.stderr


def test_shortest_text(tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("abababababababab\n")
    assert train(*flags(TINY), "--text", text).returncode == 0


def start_long_run():
    arguments = flags(TINY | {"steps": 1000000})
    process = subprocess.Popen(
        [str(PROGRAM), *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if line.startswith("step"):
            return process
    raise AssertionError(process.communicate()[1])


def test_interrupt_ends_with_the_table():
    with start_long_run() as process:
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, errors
    assert "Interrupted" in output
    assert "rank 1" in table_of(output)


def children_of(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_the_others(victim):
    with start_long_run() as process:
        ranks = children_of(process.pid)
        assert len(ranks) == 2
        os.kill(ranks[victim], signal.SIGKILL)
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode != 0
    assert "ending the others" in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


# Long, so that it is killed on its way.
LONG = TINY | {"steps": 2000, "every": 5}


def steps_of(log):
    """Losses by step; of a killed run, the last line may be half."""
    lines = log.read_text().splitlines(keepends=True)[1:] if log.exists() else []
    rows = (line.split(",") for line in lines if line.endswith("\n"))
    return {int(step): float(loss) for step, loss in rows}


def family_of(pid):
    """A process and its descendants: torchrun gives its workers sessions of their own."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(status.parent.name)] = int(status.read_text().rsplit(") ", 1)[1].split()[1])
    family = [pid]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family


def kill_at(command, log, step):
    """Runs a program until it has made so many steps, then kills it and its ranks. Its losses."""
    with subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        deadline = time.monotonic() + LIMIT
        while step not in steps_of(log) and time.monotonic() < deadline:
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.01)
        for member in family_of(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
    losses = steps_of(log)
    assert step in losses
    return losses


def check_resumed(expected, resumed, killed, tolerance):
    """The resumed run began behind a checkpoint that the killed one had made."""
    first = min(resumed)
    assert 1 < first <= max(killed) + 1 and (first - 1) % LONG["every"] == 0
    common = sorted(expected.keys() & resumed.keys())
    assert len(common) >= 10
    for step in common:
        assert resumed[step] == pytest.approx(expected[step], abs=tolerance), step


@pytest.mark.parametrize("ranks, tolerance", [(2, 0), (4, TOLERANCE)])
def test_a_killed_run_goes_on(tmp_path, ranks, tolerance):
    def run(name, ranks, step, *more):
        log = tmp_path / f"{name}.csv"
        command = [str(PROGRAM), *flags(LONG | {"ranks": ranks, "log": log}), *more]
        return kill_at(command, log, step)

    checkpoint = ("--checkpoint", str(tmp_path / "run"))
    expected = run("whole", 2, 60)
    killed = run("killed", 2, 23, *checkpoint)
    resumed = run("resumed", ranks, 60, "--sharding", "parameter", *checkpoint)
    check_resumed(expected, resumed, killed, tolerance)
