"""python -m shardstep.checkpoint. main() runs in this process, since importing torch is slow."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import Command
from helpers import assert_bitwise, assert_same, copies, make_parameters, ours, set_gradients
from implementation import ZeroRedundancyOptimizer
from ranks import run_ranks
from shardstep.checkpoint import main

pytestmark = ours

SHAPES = (9, (3, 5), 133, (), (4, 6))
TIMEOUT = 60
command = Command(main, "python -m shardstep.checkpoint", silent=True)
succeed, refused = command.succeed, command.refused


def groups_of(parameters) -> list[dict]:
    first = {"params": parameters[:2], "lr": 0.03, "betas": (0.8, 0.99)}
    return [first, {"params": parameters[2:], "weight_decay": 0.1}]


def trained(optimizer_of, steps: int = 2):
    parameters = make_parameters(*SHAPES)
    optimizer = optimizer_of(groups_of(parameters))
    for number in range(steps):
        set_gradients(parameters, number)
        optimizer.step()
    return parameters, optimizer


def plain(steps: int = 2):
    return trained(lambda groups: torch.optim.Adam(groups, lr=0.1), steps)


def sharded(groups):
    return ZeroRedundancyOptimizer(groups, torch.optim.Adam, sharding="element", lr=0.1)


def save(folder: Path) -> None:
    trained(sharded)[1].save_checkpoint(folder, rng=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    run_ranks(2, save, folder)
    return folder


@pytest.fixture
def checkpoint(saved, tmp_path) -> Path:
    """A copy to damage."""
    copy = tmp_path / "checkpoint"
    copy.mkdir()
    for file in saved.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def test_inspect_shows_a_table(saved):
    shown = succeed("inspect", saved)
    assert "saved by 2 ranks, stage 1, sharded by element" in shown
    assert "betas = (0.8, 0.99)" in shown
    assert "weight_decay = 0.1" in shown
    assert re.search(r"^state\.4\.exp_avg +float32 +4 x 6 +\d +96 B$", shown, re.MULTILINE)
    assert re.search(r"^state\.2\.exp_avg_sq +float32 +133 +2 +532 B$", shown, re.MULTILINE)
    shards = [file for file in saved.iterdir() if file.suffix == ".safetensors"]
    for shard in shards:
        assert re.search(rf"^{shard.name} +[01] +[\d.]+ k?B$", shown, re.MULTILINE)
    assert "15 tensors" in shown
    assert "2 files" in shown


def test_inspect_for_programs(saved):
    shown = json.loads(succeed("inspect", saved, "--json"))
    assert shown["world_size"] == 2
    assert shown["sharding"] == "element"
    assert [group["lr"] for group in shown["param_groups"]] == [0.03, 0.1]
    assert shown["tensors"]["state.2.exp_avg"] == {
        "dtype": "float32",
        "shape": [133],
        "bytes": 532,
        "shards": [0, 1],
    }
    assert shown["bytes"] == sum(tensor["bytes"] for tensor in shown["tensors"].values())
    assert [parameter["shape"] for parameter in shown["parameters"]] == [
        [9], [3, 5], [133], [], [4, 6],
    ]  # fmt: skip


def test_verify_is_silent_about_nothing(checkpoint):
    assert "all is well: 15 tensors in 2 files" in succeed("verify", checkpoint)

    shard = next(file for file in checkpoint.iterdir() if file.name.endswith("-1.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 4
    shard.write_bytes(content)
    result = command("verify", checkpoint)
    assert result.returncode == 1
    assert result.stdout == ""
    assert shard.name in result.stderr
    assert re.search(r"state\.\d\.(exp_avg|exp_avg_sq|step) is damaged", result.stderr)


def test_verify_names_every_damaged_tensor(checkpoint):
    from shardstep._C import Checkpoint

    tensors = Checkpoint(str(checkpoint)).tensors
    chosen = ["state.0.exp_avg", "state.4.exp_avg_sq"]
    for name in chosen:
        part = tensors[name].parts[0]
        file = checkpoint / Checkpoint(str(checkpoint)).files[part.file].name
        content = bytearray(file.read_bytes())
        content[part.offset] ^= 1
        file.write_bytes(content)
    result = command("verify", checkpoint)
    assert result.returncode == 1
    assert re.findall(r"(state\S+) is damaged", result.stderr) == chosen


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_verify_names_a_bad_file(checkpoint, damage):
    shard = next(file for file in checkpoint.iterdir() if file.name.endswith("-0.safetensors"))
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-8])
    result = command("verify", checkpoint)
    assert result.returncode == 1
    assert shard.name in result.stderr


def load_and_go_on(folder: Path) -> None:
    parameters = copies(plain(2)[0])
    zero = sharded(groups_of(parameters))
    zero.load_checkpoint(folder)
    expected, _ = plain(4)
    for number in (2, 3):
        set_gradients(parameters, number)
        zero.step()
    assert_bitwise(parameters, expected)


def test_converted_for_the_plain_optimizer_and_back(saved, tmp_path):
    file, again, back = tmp_path / "adam.pt", tmp_path / "again.pt", tmp_path / "back"
    succeed("convert", saved, file)
    state = torch.load(file, weights_only=True)
    _, expected = plain()
    assert_same(state, expected.state_dict())
    torch.optim.Adam(groups_of(make_parameters(*SHAPES)), lr=0.1).load_state_dict(state)

    succeed("convert", file, back)
    assert "1 rank," in succeed("inspect", back)
    assert "all is well" in succeed("verify", back)
    succeed("convert", back, again)
    assert again.read_bytes() == file.read_bytes()
    run_ranks(3, load_and_go_on, back)


def test_a_file_of_torch_save_becomes_a_checkpoint(tmp_path):
    file, folder, again = tmp_path / "adam.pt", tmp_path / "checkpoint", tmp_path / "again.pt"
    _, optimizer = plain()
    torch.save(optimizer.state_dict(), file)
    succeed("convert", file, folder)
    succeed("convert", folder, again)
    assert_same(torch.load(again, weights_only=True), optimizer.state_dict())


def test_a_small_file_does_not_become_a_large_checkpoint(tmp_path):
    file, folder = tmp_path / "adam.pt", tmp_path / "checkpoint"
    state = {0: {"exp_avg": torch.ones(1).expand(10**12)}}  # four bytes in the file
    torch.save({"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}, file)
    said = refused("convert", file, folder)
    assert "memory for each of its elements, got 4000000000000 bytes of elements in 4;" in said
    assert "tensor.clone()" in said
    assert not folder.exists()


# Prints by how much the process grew at its peak while it converted.
MEASURE = """
import sys
from shardstep.checkpoint import main

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

source, target, small, scratch = sys.argv[1:]
for way in ((small, scratch), (scratch, scratch + ".pt")):  # loads the code of both ways
    assert main(["convert", *way]) == 0
before = peak()
assert main(["convert", source, target]) == 0
print("grew", peak() - before)
"""


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    """4 tensors of 48 MB: glibc may keep freed memory of less than 32 MB for later."""

    def write(file: Path, elements: int, count: int) -> dict:
        state = {
            index: {"step": torch.tensor(1.0), "exp_avg": torch.full((elements,), float(index))}
            for index in range(count)
        }
        groups = [{"lr": 0.1, "params": list(range(count))}]
        torch.save({"state": state, "param_groups": groups}, file)
        return state

    big, small, again = (tmp_path / name for name in ("big.pt", "small.pt", "again.pt"))
    state = write(big, 12_000_000, 4)
    write(small, 10, 1)
    folder = tmp_path / "checkpoint"
    for source, target in ((big, folder), (folder, again)):
        scratch = tmp_path / f"scratch-{target.name}"
        result = subprocess.run(
            [sys.executable, "-c", MEASURE, *map(str, (source, target, small, scratch))],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        assert result.returncode == 0, result.stderr
        grew = int(result.stdout.split("grew ")[1])
        assert grew < 90_000, f"{grew} kB"  # two tensors would be 96,000
    assert_same(torch.load(again, weights_only=True)["state"], state)


def test_what_is_there_is_not_replaced_unasked(saved, tmp_path):
    file = tmp_path / "adam.pt"
    file.write_text("precious")
    assert f"{file} already exists; use --force to replace it" in refused("convert", saved, file)
    assert file.read_text() == "precious"
    succeed("convert", saved, file, "--force")
    assert "state" in torch.load(file, weights_only=True)
    back = tmp_path / "back"
    succeed("convert", file, back)
    assert "--force" in refused("convert", file, back)
    succeed("convert", file, back, "--force")


def test_what_cannot_be_done_is_said_in_a_sentence(tmp_path):
    nothing = tmp_path / "nothing"
    assert str(nothing) in refused("inspect", nothing)
    assert str(tmp_path) in refused("inspect", tmp_path)
    assert str(tmp_path) in refused("verify", tmp_path)
    assert str(nothing) in refused("convert", nothing, tmp_path / "target")
    text = tmp_path / "text.pt"
    text.write_text("no zip file")
    assert str(text) in refused("convert", text, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_it_is_a_command(tmp_path):
    run = [sys.executable, "-m", "shardstep.checkpoint", "verify", str(tmp_path)]
    result = subprocess.run(run, capture_output=True, text=True, timeout=TIMEOUT)
    assert (result.returncode, result.stderr) == (2, refused("verify", tmp_path))


def test_help_teaches():
    shown = succeed("--help")
    for word in ("inspect", "verify", "convert", "load_checkpoint", "weights_only", "exit status"):
        assert word in shown
    assert "one tensor in memory at a time" in succeed("convert", "--help")
    result = command("convert")
    assert result.returncode == 2
    assert "usage" in result.stderr
