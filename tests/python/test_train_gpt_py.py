"""Runs examples/train_gpt.py beside plain DDP and beside the C++ program."""

import contextlib
import functools
import importlib.util
import io
import itertools
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from matplotlib import image
from ranks import run_ranks
from test_train_gpt import (
    LIMIT,
    LONG,
    OPTIONS,
    ROOT,
    TINY,
    check_resumed,
    environment,
    flags,
    full,
    losses_of,
    memory_of,
    steps_of,
    train_and_kill,
)
from test_train_gpt import train as train_in_cpp

SCRIPT = ROOT / "examples" / "train_gpt.py"
sys.path.append(str(SCRIPT.parent))  # it imports its neighbour


def load_script():
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def train_on_this_rank(arguments):
    sys.argv[1:] = arguments
    os.environ["WORLD_SIZE"] = str(torch.distributed.get_world_size())
    script = load_script()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        script.train(*script.parse_options())
    return output.getvalue()


def train_and_die(arguments, step):
    """Trains on this rank, which is killed when it asks for the batch after `step`."""
    sys.argv[1:] = arguments
    os.environ["WORLD_SIZE"] = str(torch.distributed.get_world_size())
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
    return run_ranks(ranks, train_on_this_rank, flags(options))[0]


def start(options):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--"]
    return subprocess.Popen(
        [*torchrun, str(SCRIPT), *flags(options)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Losses, output and memory of a tiny run on 2 ranks; each is made once."""
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def run(sharding, optimizer):
        files = {"log": folder / "loss.csv", "memory": folder / "memory.csv"}
        output = train(TINY | {"sharding": sharding, "optimizer": optimizer} | files)
        return losses_of(files["log"]), output, memory_of(files["memory"])

    return run


@pytest.mark.parametrize(
    "sharding, optimizer",
    [
        ("element", "adamw"),
        *(
            pytest.param(*case, marks=full)
            for case in itertools.product(("parameter", "element"), ("adamw", "sgd", "rmsprop"))
            if case != ("element", "adamw")
        ),
    ],
)
def test_losses_equal_those_of_plain_ddp(run, sharding, optimizer):
    losses, *_ = run(sharding, optimizer)
    assert len(losses) == TINY["steps"]
    assert losses[-1] < losses[0] - 0.1
    assert losses == run("none", optimizer)[0]


def test_losses_equal_those_of_the_cpp_program(run, tmp_path):
    log = tmp_path / "cpp.csv"
    train_in_cpp(*flags(TINY | {"sharding": "element", "log": log}), ranks=2)
    # The C++ program writes nine digits.
    assert losses_of(log) == pytest.approx(run("element", "adamw")[0], abs=1e-6)


def test_stage_2_divides_the_gradients_and_learns_the_same(run, tmp_path):
    files = {"log": tmp_path / "loss.csv", "memory": tmp_path / "memory.csv"}
    train(TINY | {"stage": 2} | files)
    assert losses_of(files["log"]) == pytest.approx(run("none", "adamw")[0], abs=1e-6)
    memory = memory_of(files["memory"])
    assert memory["rank 0"][2] < 0.6 * memory["replicated"][2]


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bf16", "master": "fp32", "stage": 2},
        {"optimizer": "muon"},
        {"gradients": "int8", "stage": 2},
        pytest.param({"autocast": "bf16"}, marks=full),
    ],
    ids=lambda options: " ".join(options),
)
def test_what_is_narrow_and_muon_learn_as_in_cpp(tmp_path, options):
    files = {"log": tmp_path / "loss.csv", "memory": tmp_path / "memory.csv"}
    train(TINY | options | files)
    losses = losses_of(files["log"])
    assert max(losses[-5:]) < losses[0] - 0.3
    memory = memory_of(files["memory"])
    states = memory["rank 0"][0] + memory["rank 1"][0]
    assert states == pytest.approx(memory["replicated"][0], rel=0.05)
    cpp = tmp_path / "cpp.csv"
    train_in_cpp(*flags(TINY | options | {"log": cpp}), ranks=2)
    # Muon iterates in bfloat16, and so differs more between the two.
    tolerance = 1e-5 if "optimizer" not in options else 0.05
    assert losses_of(cpp) == pytest.approx(losses, abs=tolerance)


@full
def test_under_torchrun(run, tmp_path):
    log = tmp_path / "torchrun.csv"
    with start(TINY | {"log": log}) as process:
        output, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, errors
    assert losses_of(log) == run("element", "adamw")[0]
    assert "rank 1" in output


@pytest.mark.parametrize(
    "sharding, share",
    [("none", 1), ("element", 1 / 2), pytest.param("parameter", 1 / 2, marks=full)],
)
def test_state_of_a_rank(run, sharding, share):
    memory = run(sharding, "adamw")[2]
    assert list(memory) == ["rank 0", "rank 1", "replicated"]
    whole, *_ = memory.pop("replicated")
    for state, parameters, gradients in memory.values():
        assert whole == 2 * parameters
        assert state == pytest.approx(whole * share, rel=0.2)
        assert gradients == parameters


def test_output(run):
    output = run("element", "adamw")[1]
    assert "adamw sharded by element, 2 ranks" in output
    line = r"^step +1/30 +loss \d+\.\d+ +\d+ tokens/s +ETA \d+:\d\d$"
    assert re.search(line, output, re.MULTILINE)
    assert "sample" in output
    assert re.search(r"^rank 1 .* MiB$", output, re.MULTILINE)
    assert "\r" not in output


def test_plot(tmp_path):
    file = tmp_path / "run.png"
    train(TINY | {"plot": file}, ranks=1)
    red, _, blue, _ = image.imread(file).transpose(2, 0, 1)
    middle = red.shape[1] // 2
    assert red.shape[0] > 300 and middle > 400
    assert (blue - red > 0.3)[:, :middle].sum() > 500  # the curve
    assert (red - blue > 0.3)[:, middle:].sum() > 5000  # the optimizer's bars


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
        ("--optimizer muon --sharding none", "--optimizer muon: expected a sharded optimizer"),
        ("--master fp32", "--master: expected a sharded optimizer and '--dtype bf16'"),
        ("--rounding stochastic", "--rounding: expected a sharded optimizer, '--dtype bf16'"),
        ("--gradients bf16", "--gradients: expected '--stage 2', got '--stage 1'"),
        ("--batch 0", "--batch: expected a whole number"),
        ("--text /nowhere/text", "No such file"),
        ("--text /dev/null", "at least --context + 1 = 65 characters, got 0"),
        ("--log /nowhere/log.csv", "--log: expected a file that can be written"),
        ("--checkpoint run --sharding none", "--checkpoint: expected a sharded optimizer"),
    ],
)
def test_bad_options(monkeypatch, capsys, arguments, expected):
    assert parse(monkeypatch, arguments) == 2
    assert expected in capsys.readouterr().err


@full
def test_interrupt_ends_with_the_table():
    with start(TINY | {"steps": 1000000}) as process:
        try:
            assert any(line.startswith("step") for line in process.stdout)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
    assert "Interrupted" in output
    assert re.search(r"^rank 1 .* MiB$", output, re.MULTILINE)


def test_batch_that_the_ranks_cannot_share(monkeypatch, capsys):
    assert parse(monkeypatch, "--batch 7", WORLD_SIZE="2") == 2
    assert "--batch: expected a multiple of the 2 ranks, got '7'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "first, then, ranks, tolerance",
    [
        ("python", "cpp", 1, 1e-5),
        pytest.param("python", "python", 2, 0, marks=full),
        pytest.param("cpp", "python", 4, 1e-5, marks=full),
    ],
)
def test_a_killed_run_resumes(tmp_path, first, then, ranks, tolerance):
    """At another world size and in the other language too, from the same files."""

    def run(language, name, ranks, step, more):
        log = tmp_path / f"{name}.csv"
        options = LONG | more | {"log": log}
        if language == "cpp":
            return train_and_kill(ranks, options, step)
        run_ranks(ranks, train_and_die, flags(options), step, lost=tuple(range(ranks)))
        return steps_of(log)

    checkpoint = {"checkpoint": tmp_path / "run"}
    expected = run(then, "whole", 2, 40, {})
    killed = run(first, "killed", 2, 23, checkpoint)
    resumed = run(then, "resumed", ranks, 40, checkpoint | {"sharding": "parameter"})
    check_resumed(expected, resumed, killed, tolerance)
