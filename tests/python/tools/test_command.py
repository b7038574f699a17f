"""`shardstep` on the command line. main() runs in this process, since importing torch is slow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import Command
from ranks import run_ranks
from shardstep.__main__ import main
from shardstep._doctor_ranks import examine

TIMEOUT = 120
command = Command(main, "shardstep")
succeed, refused = command.succeed, command.refused


def test_help_teaches():
    shown = succeed("--help")
    for word in ("plan", "doctor", "inspect", "verify", "convert", "examples:", "exit status"):
        assert word in shown
    for name in ("plan", "doctor", "inspect", "verify", "convert"):
        assert "examples:\n  " in succeed(name, "--help")


def test_plan_of_a_number_of_parameters():
    shown = succeed("plan", "--parameters", "7e9", "--memory-gib", 80, "--ranks", "8,16")
    assert "7 billion parameters" in shown
    assert "fits into 80.0 GiB on" in shown
    assert "DDP                                 no number of ranks" in shown


def test_readme_shows_what_plan_prints():
    readme = (Path(__file__).resolve().parents[3] / "README.md").read_text()
    command_line, _, shown = readme.partition("$ shardstep plan ")[2].partition("\n")
    printed = succeed("plan", *command_line.split())
    assert shown.partition("\n...\n")[0] in printed


def test_plan_of_a_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = "import torch\ndef make(width):\n    return torch.nn.Linear(width, width)\n"
    Path("mine.py").write_text(source)
    expected = json.loads(succeed("plan", "--parameters", 1000 * 1001, "--json"))
    for name in ("mine.py:make", "mine:make"):
        shown = json.loads(succeed("plan", name, "--arguments", "[1000]", "--json"))
        assert shown["parameters"] == expected["parameters"]
    png = tmp_path / "plan.png"
    succeed("plan", "torch.nn:Linear", "--arguments", '{"in_features": 9, "out_features": 9}',
            "--optimizer", "SGD", "--options", '{"momentum": 0.9}', "--png", png)  # fmt: skip
    assert png.read_bytes().startswith(b"\x89PNG")


def test_plan_of_weights(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(10, 20), "b": torch.zeros(7)}, tmp_path / "model.safetensors")
    shown = json.loads(succeed("plan", tmp_path / "model.safetensors", "--json"))
    assert shown["parameters"] == 207


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ((), "expected MODEL or --parameters"),
        (("torch.nn:Nothing",), "expected Nothing in torch.nn"),
        (("no.such.module:Net",), "expected no.such.module to be a module that Python finds"),
        (("nothing.safetensors",), "expected nothing.safetensors to be a safetensors file"),
        (("torch.nn:Linear", "--arguments", "{bad"), "expected --arguments to be a JSON object or"),
        (("torch.nn:Linear", "--arguments", "3"), "expected --arguments to be a JSON object"),
        (("--parameters", "7e9", "--options", "[1]"), "expected --options to be a JSON object"),
        (("--parameters", "7e9", "--ranks", "2,x"), "expected --ranks to be numbers such as 2,4,8"),
        (("--parameters", "7e9", "--memory-gib", "-4"), "expected memory_bytes to be more than 0"),
        (("--parameters", "7e9", "--network-gbit", "0"), "expected network_bandwidth to be more"),
        (("nothing.py:Net",), "expected nothing.py to be a Python file"),
        (("model",), "expected MODEL as"),
        (("--parameters", "7e9", "--optimizer", "Nothing"), "expected an optimizer"),
        (("--parameters", "7e9", "--dtype", "float7"), "expected a dtype"),
        (("--parameters", "7e9", "--ranks", "0"), "expected a world size"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_sentence(arguments, reason):
    assert reason in refused("plan", *arguments)


def test_checkpoints_are_looked_at_by_the_same_command(tmp_path):
    assert str(tmp_path) in refused("inspect", tmp_path)
    assert str(tmp_path) in refused("verify", tmp_path)
    param = torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.Adam([param], lr=0.25)
    param.sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    succeed("convert", tmp_path / "optimizer.pt", tmp_path / "run")
    assert "exp_avg" in succeed("inspect", tmp_path / "run")
    succeed("verify", tmp_path / "run")
    succeed("convert", tmp_path / "run", tmp_path / "again.pt")
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    assert again["param_groups"][0]["lr"] == 0.25
    assert torch.equal(again["state"][0]["exp_avg"], optimizer.state[param]["exp_avg"])


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    launched = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    variables = {key: value for key, value in os.environ.items() if key not in launched}
    return subprocess.run(
        arguments,
        env={**variables, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


@pytest.mark.full
def test_the_console_script_and_the_module_are_the_same():
    script = Path(sys.executable).with_name("shardstep")
    as_module = run(sys.executable, "-m", "shardstep", "--version")
    assert as_module.returncode == 0, as_module.stderr
    assert run(str(script), "--version").stdout == as_module.stdout


def test_doctor_looks_at_ranks():
    for found in run_ranks(2, examine):
        assert len({rank["pid"] for rank in found["ranks"]}) == 2
        assert found["opens"] == [[None, None], [None, None]]
        assert found["exchange"] == "shared_memory"
        assert found["checks"] == {"stage 1": "ok", "stage 2": "ok"}
        assert found["bandwidth"]["send"] > 0


@pytest.mark.full
def test_doctor_examines_two_ranks():
    result = run(sys.executable, "-m", "shardstep", "doctor")
    assert result.returncode == 0, result.stdout + result.stderr
    for word in (
        f"torch       {torch.__version__}",
        "gloo yes",
        "open files",
        "memfd_create works",
        "share memory",
        '"auto" takes shared_memory',
        "stage 1: as the plain optimizer",
        "stage 2: as the plain optimizer",
        "rank 0 to rank 1",
    ):
        assert word in result.stdout, result.stdout


@pytest.mark.full
def test_doctor_examines_launched_ranks():
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", "3", "-m", "shardstep", "doctor", "--json"]
    result = run(*launch)
    assert result.returncode == 0, result.stderr
    shown = json.loads(result.stdout)
    assert len(shown["ranks"]) == 3
    assert shown["opens"] == [[None] * 3] * 3
    assert shown["checks"] == {"stage 1": "ok", "stage 2": "ok"}


@pytest.mark.parametrize(
    "launcher, size_name", [("mpirun", "OMPI_COMM_WORLD_SIZE"), ("srun", "SLURM_STEP_NUM_TASKS")]
)
def test_doctor_does_not_start_ranks_in_each_rank_of_another_launcher(
    monkeypatch, launcher, size_name
):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(size_name, "4")
    missing = "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"
    assert f"expected {missing} to be set, because {launcher} started 4" in refused("doctor")


def test_doctor_says_why_ranks_do_not_share_a_host():
    from shardstep._doctor import _groups
    from shardstep._doctor_ranks import _why_not

    mine = {"host": "a", "pid": 1, "pid_namespace": "pid:[1]"}
    peer = {**mine, "pid": 2**22 + 1, "fd": 3, "mark": ""}
    assert "hidepid" in _why_not(mine, peer)
    assert "different hosts" in _why_not(mine, {**peer, "host": "b"})
    assert "containers" in _why_not(mine, {**peer, "pid_namespace": "pid:[2]"})
    away = "they are apart"
    assert _groups([[None, away, None], [away, None, away], [None, away, None]]) == [[0, 2], [1]]
