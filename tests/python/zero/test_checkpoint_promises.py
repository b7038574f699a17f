"""What saves and loads promise: a snapshot of the moment of the call, failures that are reported,
one writer at a time, with any dtypes, options, modules and wrappers."""

import json
import subprocess
import sys
import threading
import zlib

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same, every_sharding, make_parameters, on_ranks, set_gradients
from implementation import ZeroRedundancyOptimizer
from shardstep._C import Checkpoint, CheckpointWriter
from test_checkpoint import fails_everywhere, rewrite, save_small, shared_folder
from torch import nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.ours


class Gate:
    """Holds up a background save until it is opened."""

    def __init__(self):
        self.opened = threading.Event()

    def __call__(self, written, total):
        assert self.opened.wait(30)


def step(made, zero, seed=0):
    set_gradients(made, seed)
    zero.step()


@every_sharding
@on_ranks(2)
def test_the_background_has_the_values_of_the_call(options):
    folder = shared_folder()
    made = make_parameters(9, (3, 5))
    lr, mean = torch.tensor(0.1), torch.ones(3)
    zero = ZeroRedundancyOptimizer(made, torch.optim.Adam, lr=lr, **options)
    step(made, zero)
    gate = Gate()
    extra = {"mean": mean, "deep": [{"mean": mean}]}
    zero.save_checkpoint(folder, extra=extra, asynchronous=True, progress=gate)
    for group in zero.param_groups:
        group["lr"].fill_(7.0)
    mean.fill_(7.0)
    extra["late"] = 1
    gate.opened.set()
    zero.wait_checkpoint()
    checkpoint = Checkpoint(str(folder))
    assert checkpoint.param_groups[0]["lr"] == 0.1
    assert_same(checkpoint.extra, {"mean": torch.ones(3), "deep": [{"mean": torch.ones(3)}]})


PROGRAM = """
import resource, sys, warnings
import torch, torch.distributed as dist
from shardstep import ZeroRedundancyOptimizer

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
made = [torch.nn.Parameter(torch.ones(1000))]
zero = ZeroRedundancyOptimizer(made, torch.optim.Adam, lr=0.1)
made[0].grad = torch.ones(1000)
zero.step()
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
zero.save_checkpoint(sys.argv[1] + "/c", asynchronous=True)
if sys.argv[2] == "deleted":
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del zero
    assert any("was not saved" in str(w.message) for w in caught), caught
    assert caught[0].category is RuntimeWarning
elif sys.argv[2] == "asked":
    try:
        zero.wait_checkpoint()
    except RuntimeError as error:
        assert "File too large" in str(error)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("end", ["exit", "deleted", "asked"])
def test_a_failure_is_said_at_the_end(tmp_path, end):
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), end],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    said = f"RuntimeWarning: shardstep: the checkpoint in {tmp_path}/c was not saved"
    assert (said in ran.stderr) == (end == "exit"), ran.stderr
    assert ("File too large (rank 0 of 1)" in ran.stderr) == (end == "exit"), ran.stderr


FORK = """
import os, signal, sys, threading
import torch, torch.distributed as dist
from shardstep import ZeroRedundancyOptimizer

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
made = [torch.nn.Parameter(torch.ones(1000))]
zero = ZeroRedundancyOptimizer(made, torch.optim.Adam, lr=0.1)
opened = threading.Event()
zero.save_checkpoint(sys.argv[1], asynchronous=True, progress=lambda *_: opened.wait())
child = os.fork()
if child == 0:
    signal.alarm(20)  # ends a child that hangs
    sys.exit(3)
_, status = os.waitpid(child, 0)
opened.set()
zero.wait_checkpoint()
assert os.waitstatus_to_exitcode(status) == 3, status
dist.destroy_process_group()
"""


def test_a_fork_does_not_wait_for_the_save_of_its_parent(tmp_path):
    command = [sys.executable, "-c", FORK, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    Checkpoint(str(tmp_path)).verify()


@on_ranks(2)
def test_one_writer_at_a_time():
    folder = shared_folder()
    made, zero = save_small(folder)
    other = ZeroRedundancyOptimizer(made, torch.optim.Adam, lr=0.1)
    step(made, other)
    gate = Gate()
    zero.save_checkpoint(folder, asynchronous=True, progress=gate)
    fails_everywhere(
        lambda: other.save_checkpoint(folder),
        RuntimeError,
        r"expected no other writer of .* got process \d+ on .* since 20\d\d",
    )
    gate.opened.set()
    zero.wait_checkpoint()
    other.save_checkpoint(folder)
    Checkpoint(str(folder)).verify()


@on_ranks(2)
def test_the_wait_for_files_can_be_set():
    folder = shared_folder()
    _, zero = save_small(folder)
    gate = Gate()
    slow = gate if dist.get_rank() == 1 else None
    zero.save_checkpoint(folder, asynchronous=True, progress=slow, timeout=0.2)
    if dist.get_rank() == 0:
        with pytest.warns(RuntimeWarning, match="waited too long for the shard .* of rank 1"):
            del zero
        dist.barrier()
    else:
        dist.barrier()
        gate.opened.set()
    with pytest.raises(ValueError, match="expected a timeout of some seconds, got -1"):
        save_small(folder / "other", timeout=-1)


class Halves(torch.optim.Optimizer):
    """Keeps float32 state of whatever parameters, and says by which dtype it was told to."""

    def __init__(self, params, lr=0.1, state_dtype=torch.float32):
        super().__init__(params, {"lr": lr, "state_dtype": state_dtype})

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["sum"] = torch.zeros_like(param, dtype=group["state_dtype"])
                    state["sum"].add_(param.grad.float() / 3)
                    param.data.add_(-group["lr"] * state["sum"])


@every_sharding
@on_ranks(2)
def test_state_and_options_keep_their_dtypes(options):
    folder = shared_folder()
    more = {"elementwise": True} if "sharding" in options else {}

    def make():
        made = make_parameters(9, (3, 5), 40, dtype=torch.bfloat16)
        return made, ZeroRedundancyOptimizer(made, Halves, **options, **more)

    made, zero = make()
    step(made, zero)
    zero.save_checkpoint(folder)
    _, other = make()
    other.load_checkpoint(folder)
    assert other.param_groups[0]["state_dtype"] is torch.float32
    saved = list(zero.optim.state.values())
    loaded = list(other.optim.state.values())
    assert_same(loaded, saved)
    assert all(state["sum"].dtype == torch.float32 for state in loaded)
    assert Checkpoint(str(folder)).param_groups[0]["state_dtype"] is torch.float32


class Elsewhere(torch.Tensor):
    """Has no storage: its elements are computed."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(function)


@on_ranks(2)
def test_state_without_memory_is_refused_by_name():
    folder = shared_folder()
    _, zero = save_small(folder)
    before = Checkpoint(str(folder)).id
    for where in ({"state": 1}, {"extra": 1}, {"option": 1}):
        tensor = Elsewhere(torch.ones(3))
        extra = None
        if "state" in where and dist.get_rank() == 1:
            next(iter(zero.optim.state.values()))["codes"] = tensor
        elif "extra" in where:
            extra = {"codes": [tensor]}
        elif "option" in where:
            zero.param_groups[0]["codes"] = tensor
        fails_everywhere(
            lambda extra=extra: zero.save_checkpoint(folder, extra=extra),
            TypeError,
            r"expected codes of parameter \d to be a dense tensor when .* got Elsewhere; shard by"
            if "state" in where
            else r"cannot save [\w. ]*codes.*: expected a tensor with memory of its own, got Else",
        )
        if "state" in where and dist.get_rank() == 1:
            del next(iter(zero.optim.state.values()))["codes"]
    assert Checkpoint(str(folder)).id == before


@on_ranks(2)
def test_options_that_the_saver_lacked_take_the_defaults():
    folder = shared_folder()
    made, _ = save_small(folder)
    if dist.get_rank() == 0:

        def older(index):
            options = index["param_groups"][0]["options"]
            options[:] = [o for o in options if o[0] not in ("decoupled_weight_decay", "eps")]

        rewrite(folder / "index.json", older)
    dist.barrier()
    other = ZeroRedundancyOptimizer(make_parameters(9, (3, 5), 40), torch.optim.Adam, lr=3, eps=0.5)
    other.param_groups[0]["eps"] = 0.25
    other.load_checkpoint(folder)
    assert other.param_groups[0]["lr"] == 0.1
    assert other.param_groups[0]["eps"] == 0.5
    assert other.param_groups[0]["decoupled_weight_decay"] is False
    assert other.optim.param_groups[0]["eps"] == 0.5
    step(made, other)


class Counting(nn.Linear):
    """Extra state: a tensor whose size changes, or any value."""

    def __init__(self, kind):
        super().__init__(3, 3)
        self.kind = kind
        self.history = torch.zeros(0) if kind == "tensor" else {"calls": 0, "scale": (1.0, None)}

    def get_extra_state(self):
        return self.history

    def set_extra_state(self, state):
        self.history = state


def module_of(wrapped):
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(Counting("tensor"), nn.BatchNorm1d(3), Counting("value"))
    if wrapped == "compiled inside":
        model[0] = torch.compile(model[0])
    if wrapped in ("compiled", "both"):
        model = torch.compile(model)
    return DistributedDataParallel(model) if wrapped in ("parallel", "both") else model


def inner(model):
    model = getattr(model, "module", model)
    return getattr(model, "_orig_mod", model)


def part(model, index):
    found = inner(model)[index]
    return getattr(found, "_orig_mod", found)


@pytest.mark.part(2)
@pytest.mark.parametrize("saved", ["not", "parallel", "compiled", "compiled inside", "both"])
@on_ranks(2)
def test_extra_state_is_kept_and_names_do_not_depend_on_wrappers(saved):
    folder = shared_folder()

    def make(wrapped):
        model = module_of(wrapped)
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)

    model, zero = make(saved)
    part(model, 0).history = torch.arange(5.0) + dist.get_rank()
    part(model, 2).history = {"calls": 3 + dist.get_rank(), "scale": (2.0, None)}
    zero.save_checkpoint(folder, module=model)
    names = [p.name for p in Checkpoint(str(folder)).parameters]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    for loaded in ("not", "parallel", "compiled", "compiled inside", "both"):
        other, optimizer = make(loaded)
        optimizer.load_checkpoint(folder, module=other)
        # Rank 0's, on the CPU as anything else that was read.
        assert torch.equal(part(other, 0).history, torch.arange(5.0, device="cpu"))
        assert part(other, 2).history == {"calls": 3, "scale": (2.0, None)}
        weights = torch.stack([p.detach() for p in (part(other, 0).bias, part(other, 2).bias)])
        everyones = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, weights)
        assert torch.equal(everyones[0], everyones[1])


@on_ranks(2)
def test_a_checkpoint_without_the_extra_state_is_said():
    folder = shared_folder()
    model = nn.Sequential(nn.Linear(3, 3))
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    zero.save_checkpoint(folder, module=model)
    other = nn.Sequential(Counting("tensor"))
    zero = ZeroRedundancyOptimizer(other.parameters(), torch.optim.Adam, lr=0.1)
    with pytest.warns(UserWarning, match="has no 0._extra_state: the module keeps its own"):
        zero.load_checkpoint(folder, module=other)


def test_negative_parameter_numbers_are_refused(tmp_path):
    def writer(params, state):
        return CheckpointWriter(
            str(tmp_path),
            tensors={},
            param_groups=[{"params": params}],
            parameters=[("w", [3], torch.float32)],
            state=state,
        )

    for params, state in (([-1], {}), ([-100_000], {}), ([0], {-1: []})):
        with pytest.raises(ValueError, match=r"expected .* got"):
            writer(params, state)
    writer([0], {}).commit()


def test_checksums_are_zlibs(tmp_path):
    """Files of the versions before stay readable."""
    writer = CheckpointWriter(
        str(tmp_path),
        tensors={"state.0.sum": (torch.float32, [1000])},
        param_groups=[{"params": [0]}],
        parameters=[("w", [1000], torch.float32)],
        state={0: ["sum"]},
    )
    writer.write("state.0.sum", torch.arange(1000.0))
    writer.commit()
    text = (tmp_path / "index.json").read_bytes()
    assert json.loads(text)["crc-32"] == f"{zlib.crc32(text[21:]):08x}"
    (part,) = Checkpoint(str(tmp_path)).tensors["state.0.sum"].parts
    assert part.checksums == [zlib.crc32(torch.arange(1000.0).numpy().tobytes())]

    def as_before(index):
        id = index.pop("id")
        index["id"] = id

    rewrite(tmp_path / "index.json", as_before)
    Checkpoint(str(tmp_path)).verify()
