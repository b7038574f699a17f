"""Sharded checkpoints: saved at one world size and sharding, loaded at any other."""

import json
import math
import re
import shutil
import tempfile
import weakref
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import (
    assert_bitwise,
    assert_same,
    everywhere,
    gathered,
    groups_over,
    make_parameters,
    on_ranks,
    set_gradients,
)
from implementation import ZeroRedundancyOptimizer
from ranks import run_ranks
from safetensors import safe_open
from shardstep._C import Checkpoint
from torch import nn

pytestmark = pytest.mark.ours

SHAPES = (9, (3, 5), 7, (2, 2), 40, (), (1,), (0, 3), (4, 3, 2, 2))
GROUPS = [{"count": 2, "lr": 0.3}, {"count": 7, "weight_decay": 0.1}]
OPTIMIZERS = {
    "adamw-fused": (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    "adam": (torch.optim.Adam, {}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd-stateless": (torch.optim.SGD, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "nadam": (torch.optim.NAdam, {}),
}


def parameters():
    """Even, odd, empty, 0-d, and channels-last."""
    made = make_parameters(*SHAPES)
    made[8] = nn.Parameter(made[8].detach().contiguous(memory_format=torch.channels_last))
    return made


def make_zero(name, options, made=None):
    optimizer_class, defaults = OPTIMIZERS[name]
    made = parameters() if made is None else made
    groups = groups_over(made, GROUPS)
    return made, ZeroRedundancyOptimizer(
        groups, optimizer_class, **options, **{"lr": 0.1, **defaults}
    )


def train(zero, made, steps):
    for step in steps:
        set_gradients(made, step)
        made[8].grad = torch.empty_like(made[8]).copy_(made[8].grad)  # as autograd lays it out
        if step % 2 == 1:
            made[1].grad = None  # a step counter of its own
        zero.step()


def save_all(folder, options):
    """For each optimizer, a checkpoint after two steps, and the parameters after four."""
    results = {}
    for name in OPTIMIZERS:
        made, zero = make_zero(name, options)
        train(zero, made, range(2))
        at = [p.detach().clone() for p in made]
        state = everywhere(zero)
        zero.save_checkpoint(Path(folder) / name)
        train(zero, made, range(2, 4))
        results[name] = (at, [p.detach().clone() for p in made], state)
    if dist.get_rank() == 0:
        torch.save(results, Path(folder) / "expected.pt")


def load_all(folder, options):
    for name, (at, after, state) in torch.load(Path(folder) / "expected.pt").items():
        made = parameters()
        for param, value in zip(made, at, strict=True):
            param.data.copy_(value)
        made, zero = make_zero(name, options, made)
        zero.param_groups[0]["lr"] = 77.0
        zero.load_checkpoint(Path(folder) / name)
        assert zero.param_groups[0]["lr"] == 0.3
        assert_same(everywhere(zero), state)
        train(zero, made, range(2, 4))
        assert_bitwise(made, after)


ELEMENT, PARAMETER = {"sharding": "element"}, {}


@pytest.mark.part(3)
@pytest.mark.parametrize(
    "saved, loaded",
    [
        ((4, ELEMENT), (3, PARAMETER)),
        ((2, PARAMETER), (3, ELEMENT)),
        ((3, ELEMENT), (2, ELEMENT)),
        ((1, PARAMETER), (2, ELEMENT)),
        ((2, ELEMENT), (1, PARAMETER)),
        ((2, PARAMETER), (2, PARAMETER)),
    ],
    ids=lambda side: f"{side[0]}-{side[1].get('sharding', 'parameter')}",
)
def test_any_world_size_and_sharding(tmp_path, saved, loaded):
    run_ranks(saved[0], save_all, str(tmp_path), saved[1])
    run_ranks(loaded[0], load_all, str(tmp_path), loaded[1])


@pytest.mark.cpu("it also trains in the test's own process")
def test_the_plain_optimizer_loads_it(tmp_path):
    run_ranks(3, save_all, str(tmp_path), ELEMENT)
    for name, (at, after, state) in torch.load(tmp_path / "expected.pt").items():
        optimizer_class, defaults = OPTIMIZERS[name]
        made = parameters()
        for param, value in zip(made, at, strict=True):
            param.data.copy_(value)
        plain = optimizer_class(groups_over(made, GROUPS), **{"lr": 0.1, **defaults})
        read = Checkpoint(str(tmp_path / name)).state_dict()
        assert_same(read, state)
        assert (
            read["state"]
            .get(8, {})
            .get("exp_avg", made[8])
            .is_contiguous(memory_format=torch.channels_last)
        )
        plain.load_state_dict(read)
        train(plain, made, range(2, 4))
        assert_bitwise(made, after)


class Tied(nn.Module):
    """A buffer that is saved, one that is not, a channels-last weight and a tied one."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(4)
        self.first = nn.Linear(4, 6, bias=False)
        self.second = nn.Linear(4, 6, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x):
        x = self.norm(self.conv(x).mean((2, 3)))
        return self.second(x) + self.first(x)


def make_tied(seed=3):
    torch.manual_seed(seed)
    return Tied()


EXTRA = {
    "step": 17,
    "large": -(2**63),
    "exact": [0.1, 1e-300, -0.0, 5e-324, 1.0, math.inf, -math.inf],
    "nested": {"pair": (1, "two", None), "empty": [], "flag": True, "text": 'ü"\n\\\u0000'},
    "tensor": torch.tensor([1.5, math.nan]),
}


def run_of(model, zero, steps):
    """Losses of some training steps whose noise comes from torch's generator."""
    losses = []
    for _ in range(steps):
        zero.zero_grad()
        loss = model(torch.randn(2, 3, 5, 5)).square().sum()
        loss.backward()
        zero.step()
        losses.append(loss.item())
    return losses


def save_run(folder):
    model = make_tied()
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, stage=2, sharding="element", lr=0.1
    )
    torch.manual_seed(dist.get_rank())
    run_of(model, zero, 2)
    # Buffers differ between ranks; those of rank 0 count.
    zero.save_checkpoint(folder, module=model, extra=EXTRA)
    return run_of(model, zero, 2)


def load_run(folder, options):
    model = make_tied(seed=5)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options, lr=0.1)
    extra = zero.load_checkpoint(folder, module=model)
    assert math.isnan(extra["tensor"][1]) and extra["tensor"][0] == 1.5
    same = {key: value for key, value in EXTRA.items() if key != "tensor"}
    assert_same({key: extra[key] for key in same}, same)
    assert math.copysign(1, extra["exact"][2]) == -1
    means = gathered(model.norm.running_mean.tolist())
    assert means[0] != [0] * 4 and all(mean == means[0] for mean in means)
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    return run_of(model, zero, 2)


def test_a_whole_run(tmp_path):
    """Module, generators and the user's own values: training continues as if uninterrupted."""
    expected = run_ranks(2, save_run, str(tmp_path))
    stage_2 = {"stage": 2, "sharding": "element"}
    assert run_ranks(2, load_run, str(tmp_path), stage_2)[0] == expected[0]
    assert run_ranks(2, load_run, str(tmp_path), {"stage": 2})[0] == expected[0]
    run_ranks(3, load_run, str(tmp_path), {})
    checkpoint = Checkpoint(str(tmp_path))
    names = [name for name in checkpoint.tensors if name.startswith("module.")]
    assert "module.first.weight" in names and "module.norm.running_var" in names
    assert "module.second.weight" not in names and "module.scratch" not in names
    parameters = [parameter.name for parameter in checkpoint.parameters]
    assert parameters == [name for name, _ in Tied().named_parameters()]
    assert (checkpoint.world_size, checkpoint.stage, checkpoint.sharding) == (2, 2, "element")
    checkpoint.verify()


def test_the_safetensors_package_reads_the_shards(tmp_path):
    run_ranks(2, save_run, str(tmp_path))
    checkpoint = Checkpoint(str(tmp_path))
    seen = 0
    for number, file in enumerate(checkpoint.files):
        assert (tmp_path / file.name).stat().st_size == file.bytes
        with safe_open(tmp_path / file.name, "pt") as shard:
            names = set(shard.keys())
            for name, tensor in checkpoint.tensors.items():
                for part in (part for part in tensor.parts if part.file == number):
                    found = shard.get_tensor(name)
                    if (part.begin, part.end) == (0, found.numel()) and not tensor.order:
                        assert list(found.shape) == tensor.shape
                    expected = checkpoint.read(name, part.begin, part.end)
                    assert found.dtype == tensor.dtype
                    assert torch.equal(found.flatten(), expected)
                    names.remove(name)
                    seen += 1
            assert not names
    assert seen > len(checkpoint.tensors) > 20


MB = 2**20


def save_large(folder):
    made = [nn.Parameter(torch.randn(3000, 1000)), nn.Parameter(torch.randn(1000))]
    zero = ZeroRedundancyOptimizer(made, torch.optim.Adam, sharding="element", lr=0.1)
    set_gradients(made, 0)
    zero.step()
    zero.save_checkpoint(folder, rng=False)


def load_large(folder, options):
    made = [nn.Parameter(torch.randn(3000, 1000)), nn.Parameter(torch.randn(1000))]
    zero = ZeroRedundancyOptimizer(made, torch.optim.Adam, **options, lr=0.1)
    zero.load_checkpoint(folder, rng=False)
    own = sum(v.nbytes for state in zero.optim.state.values() for v in state.values())
    return own, zero.checkpoint_bytes_read()


def test_a_rank_reads_what_it_owns(tmp_path):
    run_ranks(2, save_large, str(tmp_path))
    total = sum(tensor.nbytes for tensor in Checkpoint(str(tmp_path)).tensors.values())
    assert total > 22 * MB
    # Two tensors, cut where a block of 1 MB may begin or end.
    for own, read in run_ranks(3, load_large, str(tmp_path), {"sharding": "element"}):
        assert own < total / 2.9
        assert own <= read <= own + 2 * 3 * MB
    for own, read in run_ranks(2, load_large, str(tmp_path), {}):
        assert read == own


# Bad input


def save_small(folder, **more):
    made = make_parameters(9, (3, 5), 40)
    zero = ZeroRedundancyOptimizer(made, torch.optim.Adam, sharding="element", lr=0.1)
    set_gradients(made, 0)
    zero.step()
    zero.save_checkpoint(folder, **more)
    return made, zero


def rewrite(path, change):
    """Changes an index deliberately: with the right checksum."""
    index = json.loads(path.read_text())
    del index["crc-32"]
    change(index)
    rest = json.dumps(index)[1:].encode()
    path.write_bytes(b'{"crc-32":"%08x",' % zlib.crc32(rest) + rest)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def set_in(index, *path_and_value):
    *path, key, value = path_and_value
    for step in path:
        index = index[step]
    index[key] = value


def first_part(index):
    return index["tensors"]["state.2.exp_avg"]["parts"][0]


DAMAGES = {
    "a flipped bit": (lambda f: flip(shard_of(f, 1), -3), "shard-.*-1.safetensors: .* is damaged"),
    "a truncated shard": (
        lambda f: shard_of(f, 0).write_bytes(shard_of(f, 0).read_bytes()[:-1]),
        r"shard-.*-0.safetensors: expected \d+ bytes, got",
    ),
    "a missing shard": (lambda f: shard_of(f, 1).unlink(), "shard-.*-1.safetensors: No such file"),
    "a flipped bit in the index": (
        lambda f: flip(f / "index.json", (f / "index.json").read_text().index('"lr",0.1') + 7),
        "index.json: it is damaged",
    ),
    "half an index": (
        lambda f: (f / "index.json").write_bytes((f / "index.json").read_bytes()[:99]),
        "index.json: expected JSON",
    ),
    "no index": (
        lambda f: (f / "index.json").unlink(),
        "expected a checkpoint in .* no index.json",
    ),
    "no directory": (shutil.rmtree, "expected a checkpoint in .* no directory"),
    "another index": (lambda f: (f / "index.json").write_text("[]"), "index.json: index: expected"),
    "another's index": (lambda f: (f / "index.json").write_text('{"a": 1}'), "it is not an index"),
    "another version": (
        lambda f: rewrite(f / "index.json", lambda i: set_in(i, "version", 2)),
        "index.json: expected version 1, got 2",
    ),
    "a gap": (
        lambda f: rewrite(f / "index.json", lambda i: first_part(i)["elements"].__setitem__(0, 1)),
        "state.2.exp_avg: expected parts that follow each other",
    ),
    "an overlap": (
        lambda f: rewrite(
            f / "index.json",
            lambda i: set_in(
                first_part(i),
                "offset",
                i["tensors"]["state.2.exp_avg_sq"]["parts"][0]["offset"],
            ),
        ),
        "expected separate bytes for",
    ),
    "beyond the file": (
        lambda f: rewrite(f / "index.json", lambda i: set_in(first_part(i), "offset", 10**6)),
        "expected a part inside",
    ),
    "a huge shape": (
        lambda f: rewrite(
            f / "index.json",
            lambda i: set_in(i, "tensors", "state.2.exp_avg", "shape", [2**40, 2**40]),
        ),
        "expected the shape of a tensor that can exist",
    ),
    "a negative shape": (
        lambda f: rewrite(
            f / "index.json", lambda i: set_in(i, "tensors", "state.2.exp_avg", "shape", [-40])
        ),
        "at least 0, got -40",
    ),
    "a path out of the directory": (
        lambda f: rewrite(
            f / "index.json", lambda i: set_in(i, "files", 0, "name", "../../etc/passwd")
        ),
        "expected the file shard-",
    ),
    "missing state": (
        lambda f: rewrite(f / "index.json", lambda i: i["tensors"].pop("state.2.exp_avg")),
        "state.2.exp_avg: expected a tensor or a value, got neither",
    ),
}


def shard_of(folder, rank):
    (found,) = folder.glob(f"shard-*-{rank}.safetensors")
    return found


def fails_everywhere(call, error, pattern):
    """Every rank raises, one of them (or all) with its own words."""
    with pytest.raises((ValueError, RuntimeError, TypeError)) as caught:
        call()
    texts = gathered((type(caught.value).__name__, str(caught.value)))
    assert any(re.search(pattern, text) for _, text in texts), texts
    # Those who did well themselves say who did not.
    for _, text in texts:
        assert re.search(pattern, text) or re.search(r"rank \d failed with", text), texts
        assert re.search(r"\(rank \d of \d\)", text), texts
    assert any(name == error.__name__ for name, _ in texts), texts


@on_ranks(2, timeout=90)
def test_damage_is_named_everywhere_and_nothing_changes():
    folder = shared_folder()
    made, zero = save_small(folder / "good", rng=False)
    set_gradients(made, 1)
    zero.step()
    before = everywhere(zero)
    for name, (damage, pattern) in DAMAGES.items():
        bad = folder / name
        if dist.get_rank() == 0:
            shutil.copytree(folder / "good", bad)
            damage(bad)
        dist.barrier()
        try:
            fails_everywhere(lambda bad=bad: zero.load_checkpoint(bad), ValueError, pattern)
        except BaseException as error:
            raise AssertionError(name) from error
        assert_same(everywhere(zero), before)
    zero.load_checkpoint(folder / "good")


def shared_folder():
    """One temporary folder for all ranks."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    weakref.finalize(shared_folder, shutil.rmtree, folder[0], True)
    return Path(folder[0])


@on_ranks(2)
def test_what_does_not_fit_is_named_everywhere():
    folder = shared_folder()
    save_small(folder, module=nn.ParameterDict(dict(zip("ab", make_parameters(2, 2), strict=True))))

    def other(shapes=(9, (3, 5), 40), optimizer=torch.optim.Adam, groups=None, **more):
        parameters = make_parameters(*shapes)
        parameters = parameters if groups is None else groups_over(parameters, groups)
        return ZeroRedundancyOptimizer(parameters, optimizer, lr=0.5, **more)

    for zero, arguments, pattern in [
        (other((9, (5, 3), 40)), {}, r"expected parameter 1 with shape \[5, 3\], got \[3, 5\]"),
        (other((9, (3, 5))), {}, "expected 2 parameters in group 0, got 3"),
        (other(groups=[{"count": 1}, {"count": 2}]), {}, "expected 2 param groups, got 1"),
        (other(optimizer=torch.optim.SGD), {}, "expected param group 0 to have 'momentum'"),
        (
            other(),
            {"module": nn.Linear(2, 2)},
            "expected the module's weight, got a checkpoint without it",
        ),
        (
            other(),
            {"module": nn.ParameterDict({"a": make_parameters(2)[0]})},
            "expected only tensors that the module has, got module.b",
        ),
        (
            other(),
            {"module": nn.ParameterDict({"a": make_parameters(3)[0]})},
            r"expected the module's a with shape \[3\], got \[2\]",
        ),
    ]:
        before = everywhere(zero)
        fails_everywhere(
            lambda zero=zero, arguments=arguments: zero.load_checkpoint(folder, **arguments),
            ValueError,
            pattern,
        )
        assert_same(everywhere(zero), before)
    zero = other()
    zero.param_groups[0]["betas"] = 0.9
    fails_everywhere(
        lambda: zero.load_checkpoint(folder),
        ValueError,
        "expected 'betas' of param group 0 to be a number, got a sequence",
    )
    assert zero.param_groups[0]["lr"] == 0.5
