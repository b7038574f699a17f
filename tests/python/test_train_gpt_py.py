"""Runs examples/train_gpt.py beside plain DDP and beside the C++ program."""

import contextlib
import importlib.util
import io
import itertools
import os
import re
import signal
import subprocess
import sys

import pytest
from matplotlib import image
from ranks import run_ranks
from test_train_gpt import (
    LIMIT,
    LONG,
    OPTIONS,
    PROGRAM,
    ROOT,
    TINY,
    check_resumed,
    environment,
    flags,
    kill_at,
    losses_of,
    steps_of,
    table_of,
)
from test_train_gpt import train as train_in_cpp

SCRIPT = ROOT / "examples" / "train_gpt.py"


def load_script():
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def train_on_this_rank(arguments):
    sys.argv[1:] = arguments
    script = load_script()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        script.train(*script.parse_options())
    return output.getvalue()


def train_and_die(arguments, step):
    """Trains on this rank, which is killed when it asks for the batch after `step`."""
    sys.argv[1:] = arguments
    script = load_script()
    batches = script.batches

    def until_killed(*arguments):
        yield from itertools.islice(batches(*arguments), step)
        os.kill(os.getpid(), signal.SIGKILL)

    script.batches = until_killed
    with contextlib.redirect_stdout(io.StringIO()):
        script.train(*script.parse_options())


def train(options, ranks=2):
    """What rank 0 printed. The ranks are forked: a launcher would take longer than the training."""
    return run_ranks(ranks, train_on_this_rank, flags(options | {"ranks": ranks}))[0]


def start(options):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *flags(options)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Losses and output of a tiny run on 2 ranks; each is made once."""
    folder = tmp_path_factory.mktemp("runs")
    done = {}

    def run(sharding, optimizer):
        name = f"{sharding}-{optimizer}"
        if name not in done:
            log = folder / f"{name}.csv"
            output = train(TINY | {"sharding": sharding, "optimizer": optimizer, "log": log})
            done[name] = losses_of(log), output
        return done[name]

    return run


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "rmsprop"])
@pytest.mark.parametrize("sharding", ["parameter", "element"])
def test_losses_equal_those_of_plain_ddp(run, sharding, optimizer):
    losses, _ = run(sharding, optimizer)
    assert len(losses) == TINY["steps"]
    assert losses[-1] < losses[0] - 0.1
    assert losses == run("none", optimizer)[0]


def test_losses_equal_those_of_the_cpp_program(run, tmp_path):
    log = tmp_path / "cpp.csv"
    result = train_in_cpp(*flags(TINY | {"sharding": "element", "log": log}))
    assert result.returncode == 0, result.stderr
    # The C++ program writes nine digits.
    assert losses_of(log) == pytest.approx(run("element", "adamw")[0], abs=1e-6)


def test_under_torchrun(run, tmp_path):
    log = tmp_path / "torchrun.csv"
    with start(TINY | {"log": log}) as process:
        output, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, errors
    assert losses_of(log) == run("element", "adamw")[0]
    assert "rank 1" in table_of(output)


@pytest.mark.parametrize("sharding, share", [("none", 1), ("parameter", 1 / 2), ("element", 1 / 2)])
def test_state_of_a_rank(sharding, share):
    # Wide enough that the table's digits suffice.
    table = table_of(train(TINY | {"width": 128, "steps": 1, "sharding": sharding}))
    assert list(table) == ["rank 0", "rank 1"]
    for state, parameters, gradients, peak in table.values():
        assert state == pytest.approx(2 * parameters * share, rel=0.2)
        assert gradients == parameters
        assert peak > 10 * 2**20


def test_output(run):
    _, output = run("element", "adamw")
    assert "adamw sharded by element, 2 ranks" in output
    line = r"^step +1/30 +loss \d+\.\d+ +\d+ tokens/s +ETA \d+:\d\d$"
    assert re.search(line, output, re.MULTILINE)
    assert "sample" in output
    assert "\r" not in output


def test_plot(tmp_path):
    file = tmp_path / "loss.png"
    train(TINY | {"plot": file}, ranks=1)
    red, _, blue, _ = image.imread(file).transpose(2, 0, 1)
    assert red.shape[0] > 300 and red.shape[1] > 600
    assert ((blue - red) > 0.3).sum() > 500  # the line


def parse(monkeypatch, arguments, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *arguments.split()])
    with pytest.raises(SystemExit) as stop:
        load_script().main()
    return stop.value.code


def test_help_lists_every_option(monkeypatch, capsys):
    assert parse(monkeypatch, "--help") == 0
    listed = re.findall(r"^  (?:-h, )?--(\w+)", capsys.readouterr().out, re.MULTILINE)
    assert sorted(listed) == sorted({*OPTIONS, "plot"})


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("--colour red", "--colour"),
        ("--steps 0", "--steps: expected a whole number from 1 to 1000000, got '0'"),
        ("--steps 10x", "got '10x'"),
        ("--lr nan", "--lr: expected a positive number, got 'nan'"),
        ("--seed -1", "--seed"),
        ("--optimizer lion", "--optimizer: invalid choice: 'lion'"),
        ("--width 30 --heads 4", "--width: expected a multiple of --heads 4, got '30'"),
        ("--batch 7", "--batch: expected a multiple of the 2 ranks, got '7'"),
        ("--text /nowhere/text", "No such file"),
        ("--text /dev/null", "at least --context + 1 = 65 characters, got 0"),
        ("--log /nowhere/log.csv", "--log: expected a file that can be written"),
        ("--checkpoint run --sharding none", "--checkpoint: expected a sharded optimizer"),
    ],
)
def test_bad_options(monkeypatch, capsys, arguments, expected):
    assert parse(monkeypatch, arguments) == 2
    assert expected in capsys.readouterr().err


def test_ranks_that_torchrun_did_not_start(monkeypatch, capsys):
    assert parse(monkeypatch, "--ranks 2", RANK="0", WORLD_SIZE="1") == 2
    expected = "--ranks: expected what torchrun started, 1, got '2'"
    assert expected in capsys.readouterr().err


def test_interrupt_ends_with_the_table():
    with start(TINY | {"steps": 1000000}) as process:
        try:
            assert any(line.startswith("step") for line in process.stdout)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
    assert "Interrupted" in output
    assert "rank 1" in table_of(output)


@pytest.mark.parametrize(
    "first, then, ranks, tolerance",
    [("python", "python", 2, 0), ("cpp", "python", 4, 1e-5), ("python", "cpp", 1, 1e-5)],
)
def test_a_killed_run_goes_on(tmp_path, first, then, ranks, tolerance):
    """At another world size and in the other language too, from the same files."""

    def run(language, name, ranks, step, more):
        log = tmp_path / f"{name}.csv"
        options = flags(LONG | more | {"ranks": ranks, "log": log})
        if language == "cpp":
            return kill_at([str(PROGRAM), *options], log, step)
        run_ranks(ranks, train_and_die, options, step, lost=tuple(range(ranks)))
        return steps_of(log)

    checkpoint = {"checkpoint": tmp_path / "run"}
    expected = run(then, "whole", 2, 40, {})
    killed = run(first, "killed", 2, 23, checkpoint)
    resumed = run(then, "resumed", ranks, 40, checkpoint | {"sharding": "parameter"})
    check_resumed(expected, resumed, killed, tolerance)
