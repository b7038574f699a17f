"""Saves that fail, saves in the background, and what they leave behind."""

import resource

import numpy
import pytest
import torch
import torch.distributed as dist
from helpers import (
    assert_bitwise,
    assert_same,
    every_sharding,
    everywhere,
    gathered,
    make_parameters,
    on_ranks,
    set_gradients,
    sparse_parameter,
)
from implementation import ZeroRedundancyOptimizer
from shardstep._C import Checkpoint, CheckpointWriter
from test_checkpoint import fails_everywhere, save_small, shared_folder
from torch import nn

pytestmark = pytest.mark.ours


def step(made, zero, seed):
    set_gradients(made, seed)
    zero.step()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def whole(folder):
    """The optimizer's state in a checkpoint that is sound."""
    checkpoint = Checkpoint(str(folder))
    checkpoint.verify()
    return checkpoint.state_dict()


@on_ranks(2)
def test_overwriting_leaves_one_checkpoint():
    folder = shared_folder()
    made, zero = save_small(folder)
    first = names(folder)
    assert len(first) == 3
    dist.barrier()
    if dist.get_rank() == 0:
        id = "0123456789abcdef"
        for leftover in (
            f"shard-{id}-0.safetensors",
            f"shard-{id}-7.safetensors.tmp-12-0",
            "index.json.tmp-3-0",
        ):
            (folder / leftover).write_text("of a run that was killed")
        (folder / "shard-notes.txt").write_text("the user's own")
    step(made, zero, 1)
    zero.save_checkpoint(folder)
    assert_same(whole(folder), everywhere(zero))
    second = names(folder)
    assert len(second) == 4 and "shard-notes.txt" in second
    assert not (set(first) & set(second)) - {"index.json"}


class NoRoom:
    """This rank may write no file larger than `size`, as if the disk were full."""

    def __init__(self, size, rank=1):
        self.size = size if dist.get_rank() == rank else resource.RLIM_INFINITY

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

    def __exit__(self, *_):
        dist.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


@on_ranks(2)
def test_state_of_another_dtype_on_one_rank_is_refused_by_name():
    folder = shared_folder()
    net = nn.Linear(64, 64)
    zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, sharding="element", lr=1e-3)
    step(list(net.parameters()), zero, 0)
    zero.save_checkpoint(folder)
    before = names(folder)
    dist.barrier()
    if dist.get_rank() == 1:
        for state in zero.optim.state.values():
            state["exp_avg"] = state["exp_avg"].half()
    fails_everywhere(
        lambda: zero.save_checkpoint(folder),
        RuntimeError,
        r"exp_avg.*one dtype.* on all ranks, got Float .* on rank 0 and Half .* on rank 1",
    )
    dist.barrier()
    assert names(folder) == before


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "background"])
@on_ranks(3)
def test_no_room_on_one_rank(asynchronous):
    folder = shared_folder()
    made, zero = save_small(folder, rng=False)
    expected, before = whole(folder), names(folder)
    step(made, zero, 1)
    # Rank 1 cannot write its shard; rank 0 its shard, but not the index.
    shard = next(f.bytes for f in Checkpoint(str(folder)).files if f.rank == 0)
    assert shard < (folder / "index.json").stat().st_size
    for rank, size, file in ((1, 100, r"shard-\w*-1.safetensors"), (0, shard + 8, "index.json")):
        with NoRoom(size, rank):

            def save():
                zero.save_checkpoint(folder, rng=False, asynchronous=asynchronous)
                zero.wait_checkpoint()

            pattern = rf"cannot write .*{file}: File too large \(rank {rank} of 3\)"
            fails_everywhere(save, RuntimeError, pattern)
        dist.barrier()
        assert names(folder) == before
        assert_same(whole(folder), expected)
        dist.barrier()  # the next save puts its lock there
    zero.save_checkpoint(folder)
    assert_same(whole(folder), everywhere(zero))


@on_ranks(2)
def test_places_that_cannot_be_written():
    folder = shared_folder()
    _, zero = save_small(folder / "good")
    if dist.get_rank() == 0:
        (folder / "file").write_text("")
        (folder / "other").mkdir()
        (folder / "other" / "index.json").write_text('{"pages": []}')
    dist.barrier()
    cannot = "cannot create the directory .*file"
    fails_everywhere(lambda: zero.save_checkpoint(folder / "file"), RuntimeError, cannot)
    fails_everywhere(lambda: zero.save_checkpoint(folder / "file" / "x"), RuntimeError, cannot)
    fails_everywhere(
        lambda: zero.save_checkpoint(folder / "other"),
        ValueError,
        "expected .*index.json to be absent or the index of a checkpoint, got another file",
    )
    assert names(folder / "other") == ["index.json"]
    fails_everywhere(
        lambda: zero.save_checkpoint(folder / f"of rank {dist.get_rank()}"),
        ValueError,
        "expected the same on every rank, got .*of rank 0.* on rank 0 and .*of rank 1",
    )
    one_fails = folder / ("file" if dist.get_rank() == 1 else "good")
    fails_everywhere(lambda: zero.save_checkpoint(one_fails), RuntimeError, cannot)
    zero.load_checkpoint(folder / "good")


@on_ranks(2)
def test_what_json_cannot_hold_is_named():
    folder = shared_folder()
    _, zero = save_small(folder)
    expected = whole(folder)

    def refused(pattern, extra=None, **more):
        fails_everywhere(
            lambda: zero.save_checkpoint(folder, extra=extra, **more), TypeError, pattern
        )
        assert_same(whole(folder), expected)

    refused("cannot save extra.a.b: .* got object", {"a": {"b": object()}})
    refused("cannot save extra.a: expected strings as keys, got 3", {"a": {3: 4}})
    refused("cannot save extra.n: expected an int of 64 bits", {"n": 2**63})
    # On one rank only.
    refused(
        "cannot save extra.f: .* got function", {"f": step} if dist.get_rank() == 1 else {"f": 1}
    )
    zero.param_groups[0]["schedule"] = step
    refused("cannot save param group 0.schedule: .* got function")
    del zero.param_groups[0]["schedule"], zero.optim.param_groups[0]["schedule"]
    if zero.optim.state:
        next(iter(zero.optim.state.values()))["sparse"] = sparse_parameter()
    fails_everywhere(
        lambda: zero.save_checkpoint(folder),
        TypeError,
        r"expected sparse of parameter \d to be a dense tensor when sharding by element",
    )
    assert_same(whole(folder), expected)


@on_ranks(2)
def test_arguments_of_the_wrong_type_are_named():
    folder = shared_folder()
    _, zero = save_small(folder)

    def refused(error, pattern, bad, good=None):
        """Also on one rank only."""
        for ranks in ({0, 1}, {0}, {1}):
            arguments = bad if dist.get_rank() in ranks else good or {}
            arguments = {"directory": folder, **arguments}
            fails_everywhere(lambda mine=arguments: zero.save_checkpoint(**mine), error, pattern)

    for extra in ([1], 5, "x"):
        pattern = f"expected extra to be a dict, got {type(extra).__name__} "
        refused(TypeError, pattern, {"extra": extra})
    refused(
        TypeError,
        r"expected keep_last to be an int or None, got 1.5",
        {"directory": folder / "{step}", "extra": {"step": 1}, "keep_last": 1.5},
    )
    wide = {"directory": folder / "{step}", "extra": {"step": 1}, "keep_last": 2**70}
    refused(ValueError, "expected keep_last of at most", wide)
    half = "a\ud800"
    refused(ValueError, r"cannot save extra.a\[1\]: .* got 'a\\ud800'", {"extra": {"a": [0, half]}})
    refused(ValueError, r"a key of extra.a: .* got 'a\\ud800'", {"extra": {"a": {half: 1}}})


@on_ranks(2)
def test_scalars_of_numpy_in_extra_become_numbers():
    folder = shared_folder()
    _, zero = save_small(folder)
    extra = {
        "step": numpy.int64(7),
        "deep": [{"loss": numpy.float32(0.5)}, (numpy.bool_(True), numpy.float64(0.1))],
    }
    zero.save_checkpoint(folder / "{step}", extra=extra)
    expected = {"step": 7, "deep": [{"loss": 0.5}, (True, 0.1)]}
    assert_same(zero.load_checkpoint(folder / "7"), expected)
    fails_everywhere(
        lambda: zero.save_checkpoint(folder, extra={"a": numpy.ones(1)}),
        TypeError,
        "cannot save extra.a: .* got .*ndarray",
    )


@every_sharding
@on_ranks(2)
def test_hyper_parameters_come_back_as_they_were(options):
    folder = shared_folder()
    made = make_parameters(9, (3, 5), 7)
    zero = ZeroRedundancyOptimizer(
        made, torch.optim.Adam, **options, lr=torch.tensor(0.1), betas=(0.9, 0.5), foreach=False
    )
    step(made, zero, 0)
    zero.param_groups[0] |= {
        "name": "ü",
        "nothing": None,
        "list": [1, 2.0, (3,)],
        "inf": float("inf"),
    }
    zero.save_checkpoint(folder)
    expected = {k: v for k, v in zero.param_groups[0].items() if k != "params"}
    other = ZeroRedundancyOptimizer(
        copies_of(made), torch.optim.Adam, **options, lr=torch.tensor(0.5), capturable=False
    )
    other.load_checkpoint(folder)
    found = {k: v for k, v in other.param_groups[0].items() if k != "params"}
    assert_same(found, {key: expected[key] for key in found} | expected)
    assert_same(everywhere(other), everywhere(zero))


def copies_of(made):
    return [nn.Parameter(p.detach().clone()) for p in made]


@every_sharding
@on_ranks(2, 3)
def test_in_the_background(options):
    """The state at the call is written, whatever training does meanwhile."""
    folder = shared_folder()
    made = make_parameters((700, 1000), 5000)
    model = nn.ParameterList(made)
    zero = ZeroRedundancyOptimizer(made, torch.optim.Adam, **options, lr=0.1)
    assert zero.checkpoint_progress() == (0, 0)
    for save in range(3):
        step(made, zero, save)
        expected, values = everywhere(zero), [p.detach().clone() for p in made]
        zero.save_checkpoint(folder, module=model, asynchronous=True)  # waits for the last one
        for more in range(2):
            step(made, zero, 10 * save + more)
        written, total = zero.checkpoint_progress()
        assert 0 <= written <= total
        assert sum(gathered(total)) > 3 * 700_000 * 4
    zero.wait_checkpoint()
    assert zero.checkpoint_progress() == (total, total)
    zero.wait_checkpoint()
    assert len(names(folder)) == 1 + dist.get_world_size()
    assert_same(whole(folder), expected)
    zero.load_checkpoint(folder, module=model)
    assert_bitwise(made, values)
    assert_same(everywhere(zero), expected)


@on_ranks(2)
def test_progress_is_told():
    folder = shared_folder()
    made = make_parameters((2000, 1000))
    zero = ZeroRedundancyOptimizer(made, torch.optim.Adam, sharding="element", lr=0.1)
    step(made, zero, 0)
    for asynchronous in (False, True):
        told: list[tuple[int, int]] = []

        def tell(*numbers, told=told):
            told.append(numbers)

        zero.save_checkpoint(folder, asynchronous=asynchronous, progress=tell)
        zero.wait_checkpoint()
        written, total = told[-1]
        assert written == total > 7 * 2**20
        assert told == sorted(told)

    def interrupt(written, total):
        raise KeyboardInterrupt if dist.get_rank() == 1 else RuntimeError("stop")

    expected = whole(folder)
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        zero.save_checkpoint(folder, progress=interrupt)
    assert_same(whole(folder), expected)


def test_without_wait_the_save_ends_with_the_program(tmp_path):
    """Nobody calls wait_checkpoint: the checkpoint is whole all the same."""
    from ranks import run_ranks

    run_ranks(2, _save_and_leave, str(tmp_path))
    assert len(whole(tmp_path)["state"]) == 1


def _save_and_leave(folder):
    made = make_parameters((1000, 1000))
    zero = ZeroRedundancyOptimizer(made, torch.optim.Adam, sharding="element", lr=0.1)
    step(made, zero, 0)
    zero.save_checkpoint(folder, asynchronous=True)


def test_a_writer_of_its_own(tmp_path):
    """What converts other files writes one tensor at a time."""
    tensors = {"state.0.exp_avg": torch.randn(3, 4), "state.0.step": torch.tensor(3.0)}
    declared = {name: (t.dtype, list(t.shape)) for name, t in tensors.items()}

    def writer(**more):
        return CheckpointWriter(
            str(tmp_path),
            **{
                "tensors": declared,
                "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}],
                "parameters": [("w", [3, 4], torch.float32)],
                "state": {0: ["step", "exp_avg", "flag"]},
                "values": {"state.0.flag": True},
            }
            | more,
        )

    made = writer()
    made.write("state.0.step", tensors["state.0.step"])
    with pytest.raises(ValueError, match=r"expected state.0.exp_avg to be written before commit"):
        made.commit()
    with pytest.raises(ValueError, match=r"expected state.0.exp_avg of Float and sizes"):
        made.write("state.0.exp_avg", torch.zeros(4, 3))
    with pytest.raises(ValueError, match="that the index names, got x"):
        made.write("x", torch.zeros(4, 3))
    made.write("state.0.exp_avg", tensors["state.0.exp_avg"].t().contiguous().t())
    with pytest.raises(ValueError, match="expected a checkpoint"):
        Checkpoint(str(tmp_path))
    made.commit()
    assert len(names(tmp_path)) == 2
    assert_same(
        whole(tmp_path),
        {
            "state": {
                0: {"step": torch.tensor(3.0), "exp_avg": tensors["state.0.exp_avg"], "flag": True}
            },
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}],
        },
    )
    with pytest.raises(ValueError, match="expected each of 1 parameters once, got 1"):
        writer(param_groups=[{"params": [0, 1]}])
    with pytest.raises(ValueError, match=r"state.0.other: expected a tensor or a value"):
        writer(state={0: ["step", "exp_avg", "flag", "other"]})
    del made
    assert len(names(tmp_path)) == 2
