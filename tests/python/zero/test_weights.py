"""Checkpoints without ranks and without an optimizer, series of checkpoints, and what else a run
needs to go on: generators and schedulers."""

import os
import random
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy
import pytest
import torch
from helpers import assert_bitwise, assert_same, everywhere, ours
from implementation import ZeroRedundancyOptimizer
from ranks import run_ranks
from shardstep import Checkpoint
from shardstep.checkpoint import main
from test_checkpoint import fails_everywhere, save_small
from torch import nn

pytestmark = ours


class Net(nn.Module):
    """Has tied weights, a buffer, extra state and a channels-last weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(6)
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.count = 0

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]

    def forward(self, tokens):
        hidden = self.norm(self.embedding(tokens))
        picture = self.convolution(hidden[:3].reshape(1, 3, -1, 1).expand(-1, -1, -1, 6))
        return self.head(hidden).square().mean() + picture.square().mean()


def make(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def save(folder: Path) -> dict:
    module = make()
    module.count = 7
    zero = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.AdamW, stage=2, sharding="element", module=module, lr=0.1
    )
    module(torch.arange(11)).backward()
    zero.step()
    zero.save_checkpoint(folder, module=module, rng=False, extra={"step": 3})
    return module.state_dict()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The checkpoint, and what the module was."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    return folder, run_ranks(2, save, folder)[0]


def test_names_shapes_and_tensors(saved):
    folder, expected = saved
    checkpoint = Checkpoint(folder)
    assert checkpoint.extra == {"step": 3}
    assert "embedding.weight" in checkpoint.module_names()
    assert "head.weight" not in checkpoint.module_names()  # tied
    assert set(checkpoint.names()) >= {"module.norm.running_mean", "state.0.exp_avg"}
    name = "module.convolution.weight"
    assert checkpoint.shape(name) == (4, 3, 3, 3)
    assert checkpoint.dtype(name) == torch.float32
    whole = checkpoint.read(name)
    assert_bitwise([whole], [expected["convolution.weight"]])
    assert whole.is_contiguous(memory_format=torch.channels_last)
    in_memory = whole.permute(0, 2, 3, 1).flatten()
    assert_bitwise([checkpoint.read(name, 10, 20)], [in_memory[10:20]])
    with pytest.raises(ValueError, match="expected a tensor nothing in the checkpoint"):
        checkpoint.shape("nothing")


@pytest.mark.parametrize("wrap", [lambda m: m, torch.compile], ids=["plain", "compiled"])
def test_weights_into_a_module(saved, wrap):
    folder, expected = saved
    module = make(seed=1)
    Checkpoint(folder).load_module(wrap(module))
    assert module.count == 7
    state = {k: v for k, v in module.state_dict().items() if isinstance(v, torch.Tensor)}
    assert_bitwise(list(state.values()), [expected[name] for name in state])
    assert module.head.weight is module.embedding.weight
    wide = make(seed=1).double()
    Checkpoint(folder).load_module(wide)
    assert_bitwise([wide.embedding.weight.float()], [expected["embedding.weight"]])


def test_what_does_not_fit_changes_nothing(saved):
    folder, _ = saved
    for module, reason in (
        (nn.Sequential(nn.Linear(2, 2)), "expected the module's 0.weight in the checkpoint"),
        (nn.ModuleDict({"embedding": nn.Embedding(12, 6)}), r"expected embedding.weight of shape"),
        (nn.ModuleDict({"embedding": nn.Embedding(11, 6)}), r"got \S+, which the module lacks"),
    ):
        before = [parameter.clone() for parameter in module.parameters()]
        with pytest.raises(ValueError, match=reason):
            Checkpoint(folder).load_module(module)
        assert_bitwise(list(module.parameters()), before)


def test_damaged_weights_are_not_loaded(saved, tmp_path):
    folder, _ = saved
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    checkpoint = Checkpoint(copy)
    part = checkpoint.tensors["module.norm.weight"].parts[0]
    shard = copy / checkpoint.files[part.file].name
    content = bytearray(shard.read_bytes())
    content[part.offset] ^= 1
    shard.write_bytes(content)
    module = make(seed=1)
    before = [parameter.clone() for parameter in module.parameters()]
    with pytest.raises(ValueError, match=r"norm\.weight is damaged"):
        checkpoint.load_module(module)
    assert_bitwise(list(module.parameters()), before)


def test_converted_to_safetensors(saved, tmp_path):
    from safetensors.torch import load_file, load_model

    folder, expected = saved
    file = tmp_path / "model.safetensors"
    assert main(["convert", str(folder), str(file)]) == 0
    weights = load_file(file)
    assert weights.keys() == set(Checkpoint(folder).module_names())
    assert_bitwise(list(weights.values()), [expected[name] for name in weights])
    assert_bitwise(
        list(Checkpoint(folder).module_state_dict().values()),
        [expected[name] for name in Checkpoint(folder).module_names()],
    )
    module = nn.ModuleDict({"embedding": nn.Embedding(11, 6), "norm": nn.BatchNorm1d(6)})
    load_model(module, file, strict=False)
    assert_bitwise([module["embedding"].weight], [expected["embedding.weight"]])
    assert main(["convert", str(folder), str(file)]) == 2  # exists
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_checkpoint_without_weights_says_so(tmp_path):
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "adam.pt")
    assert main(["convert", str(tmp_path / "adam.pt"), str(tmp_path / "run")]) == 0
    with pytest.raises(ValueError, match="got none; save it with module="):
        Checkpoint(tmp_path / "run").load_module(nn.Linear(2, 2))


# Series


def series(folder: Path, asynchronous: bool) -> list[tuple[list[str], int]]:
    """After each save: which checkpoints there are, and the step of the latest."""
    parameter = nn.Parameter(torch.ones(100))
    zero = ZeroRedundancyOptimizer([parameter], torch.optim.Adam, lr=0.1)
    seen = []
    for step in (8, 9, 10, 11):
        parameter.grad = torch.ones(100)
        zero.step()
        zero.save_checkpoint(
            folder / "{step:03d}", extra={"step": step}, keep_last=2, asynchronous=asynchronous
        )
        zero.wait_checkpoint()
        seen.append((sorted(os.listdir(folder)), zero.load_checkpoint(folder / "latest")["step"]))
        torch.distributed.barrier()
    return seen


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_stay_and_latest_is_whole(tmp_path, asynchronous):
    foreign = tmp_path / "not ours"
    foreign.mkdir()
    for seen in run_ranks(2, series, tmp_path, asynchronous):
        assert seen == [
            (["008", "latest", "not ours"], 8),
            (["008", "009", "latest", "not ours"], 9),
            (["009", "010", "latest", "not ours"], 10),
            (["010", "011", "latest", "not ours"], 11),
        ]
    assert os.readlink(tmp_path / "latest") == "011"
    assert Checkpoint(tmp_path / "latest").extra == {"step": 11}
    assert not list(tmp_path.glob("*tmp*"))


def one_rank(folder: Path) -> None:
    parameter = nn.Parameter(torch.ones(100))
    zero = ZeroRedundancyOptimizer([parameter], torch.optim.SGD, lr=0.1)

    def save(step: int, pattern: str = "{step}", **options) -> None:
        zero.save_checkpoint(folder / pattern, extra={"step": step}, **options)

    save(1, keep_last=1)
    reader = Checkpoint(folder / "latest")
    save(2, keep_last=1)
    # It is being read, and goes away with the next save after that.
    assert sorted(os.listdir(folder)) == ["1", "2", "latest"]
    reader.verify()
    assert reader.directory.endswith("1")
    del reader
    save(3, keep_last=1)
    assert sorted(os.listdir(folder)) == ["3", "latest"]
    (folder / "3" / "notes.txt").write_text("precious")
    save(4, keep_last=1)
    assert os.listdir(folder / "3") == ["notes.txt"]

    for pattern, options, reason in (
        ("{epoch}", {}, "expected an integer or a name called epoch in `extra`"),
        ("plain", {"keep_last": 2}, "with keep_last, got"),
        ("{step}", {"keep_last": 0}, "expected keep_last of 1 or more, got 0"),
    ):
        with pytest.raises(ValueError, match=reason):
            save(5, pattern, **options)
    save(5, "{{step}}")
    assert sorted(os.listdir(folder)) == ["3", "4", "latest", "{step}"]
    os.unlink(folder / "latest")
    (folder / "latest").write_text("precious")
    with pytest.raises(RuntimeError, match="is complete, but cannot be made the latest"):
        save(6)
    assert Checkpoint(folder / "6").extra == {"step": 6}


def test_what_is_read_or_not_ours_stays(tmp_path):
    run_ranks(1, one_rank, tmp_path)


# Generators and schedulers


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), numpy.random.rand(), torch.rand(()).item()]


def generators_and_schedulers(folder: Path) -> None:
    rank = torch.distributed.get_rank()
    parameter = nn.Parameter(torch.ones(100))

    def make():
        zero = ZeroRedundancyOptimizer([parameter], torch.optim.SGD, lr=0.1)
        warm = torch.optim.lr_scheduler.LinearLR(zero, total_iters=3)
        step = torch.optim.lr_scheduler.StepLR(zero, 2)
        both = torch.optim.lr_scheduler.SequentialLR(zero, [warm, step], [3])
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(zero)
        return zero, [both, plateau]

    def go_on(zero, schedulers, steps: int) -> list[float]:
        rates = []
        for number in range(steps):
            parameter.grad = torch.ones(100)
            zero.step()
            schedulers[0].step()
            schedulers[1].step(float(number))
            rates.append(zero.param_groups[0]["lr"])
        return rates

    random.seed(rank)
    numpy.random.seed(rank)
    random.gauss(0, 1)  # leaves a second number in the generator
    zero, schedulers = make()
    go_on(zero, schedulers, 2)
    zero.save_checkpoint(folder, rng="all", schedulers=schedulers, extra={"mine": 1})
    expected = draw(), go_on(zero, schedulers, 4)

    random.seed(99)
    numpy.random.seed(99)
    zero, schedulers = make()
    assert zero.load_checkpoint(folder, schedulers=schedulers) == {"mine": 1}
    assert (draw(), go_on(zero, schedulers, 4)) == expected
    assert zero.load_checkpoint(folder) == {"mine": 1}  # who wants none gets none
    with pytest.raises(ValueError, match="expected 1 schedulers in the checkpoint, got 2"):
        zero.load_checkpoint(folder, schedulers=schedulers[:1])
    with pytest.raises(ValueError, match='expected rng to be True, False or "all"'):
        zero.save_checkpoint(folder, rng="numpy")


def test_generators_and_schedulers_go_on(tmp_path):
    run_ranks(2, generators_and_schedulers, tmp_path)


class Holder:
    """Has whatever state."""

    def __init__(self, state=None) -> None:
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state) -> None:
        self.state = state


def mappings_of_schedulers(folder: Path) -> None:
    schedules = torch.optim.lr_scheduler
    parameter = nn.Parameter(torch.ones(10))
    odd = {
        "counter": Counter([3, 3, 5]),
        "ordered": OrderedDict(b=1, a={2.5: None, (1, 2): [Counter(a=1)]}),
        "looks like ours": {"shardstep.mapping": "Counter", "items": []},
        "number": numpy.float64(0.5),
    }

    def make():
        zero = ZeroRedundancyOptimizer([parameter], torch.optim.SGD, lr=1.0)
        milestones = [1, 3, 3]
        several = schedules.MultiStepLR(zero, milestones)
        inner = schedules.MultiStepLR(zero, milestones)
        sequential = schedules.SequentialLR(zero, [schedules.LinearLR(zero), inner], [2])
        chained = schedules.ChainedScheduler([schedules.MultiStepLR(zero, milestones)], zero)
        return zero, [several, sequential, chained, Holder()]

    def rates(zero, schedulers, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            zero.step()
            for scheduler in schedulers[:-1]:
                scheduler.step()
            found.append(zero.param_groups[0]["lr"])
        return found

    zero, schedulers = make()
    rates(zero, schedulers, 2)
    schedulers[-1].state = odd
    zero.save_checkpoint(folder, schedulers=schedulers)
    expected = rates(zero, schedulers, 5)
    zero, schedulers = make()
    zero.load_checkpoint(folder, schedulers=schedulers)
    assert type(schedulers[0].milestones) is Counter
    assert_same(schedulers[-1].state, {**odd, "number": 0.5})
    assert list(schedulers[-1].state["ordered"]) == ["b", "a"]
    assert rates(zero, schedulers, 5) == expected
    schedulers[-1].state = {"of": defaultdict(int, a=1)}
    pattern = r"cannot save extra.shardstep.schedulers\[3\].of: .* got .*defaultdict"
    with pytest.raises(TypeError, match=pattern):
        zero.save_checkpoint(folder, schedulers=schedulers)


def test_schedulers_with_counters_and_numbers_as_keys_go_on(tmp_path):
    run_ranks(1, mappings_of_schedulers, tmp_path)


def raises_on_rank_1(call, error) -> None:
    """The user's own error on rank 1, and on rank 0 that there was one."""
    on_rank_0 = (RuntimeError, "shardstep: rank 1 failed with: 'not mine'")
    error, text = (error, "not mine") if torch.distributed.get_rank() == 1 else on_rank_0
    with pytest.raises(error, match=text):
        call()


class Stubborn:
    """A scheduler whose state one rank cannot load."""

    def state_dict(self):
        return {"rank": 0}

    def load_state_dict(self, state):
        if torch.distributed.get_rank() == 1:
            raise KeyError("not mine")


def schedulers_of_one_rank(folder: Path) -> None:
    rank = torch.distributed.get_rank()
    _, zero = save_small(folder / "none")
    scheduler = torch.optim.lr_scheduler.StepLR(zero, 2)
    zero.save_checkpoint(folder / "one", schedulers=[scheduler])

    def refused(error, pattern, mine, call=zero.load_checkpoint):
        before = everywhere(zero)
        mine = mine if rank == 1 else [scheduler]
        fails_everywhere(lambda: call(folder / "one", schedulers=mine), error, pattern)
        assert_same(everywhere(zero), before)

    refused(ValueError, "expected 2 schedulers in the checkpoint, got 1", [scheduler, scheduler])
    bare = r"expected schedulers to be a list of objects with {}\(\), got StepLR; pass schedulers="
    refused(TypeError, bare.format("load_state_dict"), scheduler)
    refused(TypeError, bare.format("state_dict"), scheduler, zero.save_checkpoint)
    refused(TypeError, "got one of int; pass schedulers=", [3])
    refused(TypeError, "got dict; pass schedulers=", {"a": scheduler}, zero.save_checkpoint)
    mine = Stubborn() if rank == 1 else scheduler
    raises_on_rank_1(lambda: zero.load_checkpoint(folder / "one", schedulers=[mine]), KeyError)
    assert zero.load_checkpoint(folder / "one", schedulers=[scheduler]) == {}


def test_schedulers_that_fail_on_one_rank_fail_on_all(tmp_path):
    run_ranks(2, schedulers_of_one_rank, tmp_path, timeout=20)


class Fragile(nn.Linear):
    """A module whose extra state one rank cannot load."""

    def get_extra_state(self):
        return 3

    def set_extra_state(self, state):
        if torch.distributed.get_rank() == 1:
            raise KeyError("not mine")


def extra_state_of_one_rank(folder: Path) -> None:
    model = Fragile(3, 3)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    zero.save_checkpoint(folder, module=model)
    raises_on_rank_1(lambda: zero.load_checkpoint(folder, module=model), KeyError)
    zero.load_checkpoint(folder)


def test_extra_state_that_fails_on_one_rank_fails_on_all(tmp_path):
    run_ranks(2, extra_state_of_one_rank, tmp_path, timeout=20)
