"""torch.distributed.checkpoint: each rank saves its part; any world size and sharding loads it."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import (
    assert_bitwise,
    assert_same,
    consolidated,
    copies,
    every_sharding,
    groups_over,
    make_parameters,
    on_ranks,
    ours,
)
from implementation import ZeroRedundancyOptimizer
from ranks import run_ranks

pytestmark = ours

# Even, odd, empty, without axes, longer than some cache lines; one more in another memory order.
SHAPES = (9, (3, 5), 0, (), 133, (2, 2))
GROUPS = [{"count": 3, "lr": 0.03}, {"count": 4, "weight_decay": 0.1}]
NEVER_USED = 1
ELEMENT = {"sharding": "element"}
PARAMETER = {"sharding": "parameter"}
STAGE_2 = {"stage": 2}


def make_model(shapes=SHAPES):
    parameters = make_parameters(*shapes)
    image = torch.randn(4, 3, 2, 5, generator=torch.Generator().manual_seed(2))
    return [*parameters, torch.nn.Parameter(image.contiguous(memory_format=torch.channels_last))]


def train(parameters, optimizer, first: int, last: int) -> None:
    """Steps `first` to `last`; the gradients are the same on every rank, in either stage."""
    for number in range(first, last):
        generator = torch.Generator().manual_seed(number)
        optimizer.zero_grad()
        terms = [(p * torch.randn(p.shape, generator=generator)).sum() for p in parameters]
        del terms[NEVER_USED]
        sum(terms).backward()
        optimizer.step()


@dataclasses.dataclass(frozen=True)
class Run:
    """An optimizer that ranks share out; the same class and arguments make the plain one."""

    options: dict[str, Any]
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.Adam
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    shapes: tuple[Any, ...] = SHAPES

    def plain(self, steps: int):
        """The parameters and the optimizer after some steps without ranks."""
        parameters = make_model(self.shapes)
        groups = groups_over(parameters, GROUPS)
        optimizer = self.optimizer_class(groups, **{"lr": 0.1, **self.defaults})
        train(parameters, optimizer, 0, steps)
        return parameters, optimizer

    def sharded(self, parameters, **options: Any):
        groups = groups_over(parameters, GROUPS)
        options = {"lr": 0.1, **self.options, **self.defaults, **options}
        return ZeroRedundancyOptimizer(groups, self.optimizer_class, **options)


def save(run: Run, folder: Path) -> None:
    parameters = make_model(run.shapes)
    zero = run.sharded(parameters)
    train(parameters, zero, 0, 3)
    dcp.save({"optimizer": zero.sharded_state_dict()}, checkpoint_id=folder)


def load(zero, folder: Path) -> None:
    state = {"optimizer": zero.sharded_state_dict()}
    dcp.load(state, checkpoint_id=folder)
    zero.load_sharded_state_dict(state["optimizer"])


def check_loaded(zero, expected) -> None:
    state = consolidated(zero)
    if state is not None:
        assert_same(state, expected.state_dict())


def load_and_go_on(run: Run, folder: Path) -> None:
    """A fresh optimizer has the state of the plain one, and trains as that does."""
    trained, expected = run.plain(3)
    parameters = copies(trained)
    zero = run.sharded(parameters, lr=7.0)
    load(zero, folder)
    check_loaded(zero, expected)
    train(parameters, zero, 3, 5)
    if run.options.get("stage") == 2 and zero.world_size == 3:
        return  # a third of three equal gradients may be another number
    assert_bitwise(parameters, run.plain(5)[0])


@pytest.mark.part(5)
@pytest.mark.parametrize(
    ("saved", "loaded", "from_options", "to_options"),
    [
        (2, 3, ELEMENT, PARAMETER),
        (2, 1, ELEMENT, PARAMETER),
        (2, 1, ELEMENT, ELEMENT),
        (3, 2, PARAMETER, ELEMENT),
        (1, 2, PARAMETER, ELEMENT),
        (4, 3, ELEMENT, ELEMENT),
        (2, 3, {**ELEMENT, **STAGE_2}, PARAMETER),
        (2, 3, PARAMETER, {**ELEMENT, **STAGE_2}),
        (2, 4, {**PARAMETER, **STAGE_2}, {**ELEMENT, **STAGE_2}),
        (2, 4, {**ELEMENT, "parameters_as_bucket_view": True}, {**PARAMETER, **STAGE_2}),
    ],
)
def test_saved_at_one_world_size_loaded_at_another(
    saved, loaded, from_options, to_options, tmp_path
):
    run_ranks(saved, save, Run(from_options), tmp_path)
    run_ranks(loaded, load_and_go_on, Run(to_options), tmp_path)


@pytest.mark.part(3)
@pytest.mark.parametrize(
    ("optimizer_class", "defaults"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
        (torch.optim.Rprop, {}),
    ],
)
def test_any_optimizers_state_is_cut_anew(optimizer_class, defaults, tmp_path):
    for number, (saved, loaded) in enumerate([(ELEMENT, PARAMETER), (PARAMETER, ELEMENT)]):
        folder = tmp_path / str(number)
        run_ranks(2, save, Run(saved, optimizer_class, defaults), folder)
        run_ranks(3, load_and_go_on, Run(loaded, optimizer_class, defaults), folder)


def test_state_with_axes_of_its_own_moves_with_its_parameter(tmp_path):
    """Adafactor keeps sums of rows and columns; it divides by the number of elements."""
    shapes = tuple(shape if shape != 0 else 1 for shape in SHAPES)
    run = Run(PARAMETER, torch.optim.Adafactor, shapes=shapes)
    run_ranks(2, save, run, tmp_path)
    run_ranks(3, load_and_go_on, run, tmp_path)


@on_ranks(2)
def _save_and_look(options, folder):
    parameters = make_model()
    zero = Run(options).sharded(parameters)
    train(parameters, zero, 0, 2)
    state = zero.sharded_state_dict()
    for local in zero._local:
        for name in ("exp_avg", "exp_avg_sq"):
            if local.index != NEVER_USED:
                kept = zero.optim.state[local.tensor][name]
                assert state["state"][str(local.index)][name].elements.data_ptr() == kept.data_ptr()
    dcp.save({"optimizer": state}, checkpoint_id=folder)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for index, _ in enumerate(parameters):
        if index == NEVER_USED:
            continue
        wanted = {
            (part.begin, part.end - part.begin): part.rank for part in zero.engine.owners(index)
        }
        for name in ("exp_avg", "exp_avg_sq"):
            key = f"optimizer.state.{index}.{name}"
            chunks = metadata.state_dict_metadata[key].chunks
            assert {(*c.offsets, *c.sizes) for c in chunks} == set(wanted)
            for (begin, _), rank in wanted.items():
                place = metadata.storage_data[dcp.metadata.MetadataIndex(key, (begin,))]
                assert place.relative_path.startswith(f"__{rank}_")


@every_sharding
def test_each_rank_writes_what_it_owns_from_where_it_lies(options, tmp_path):
    _save_and_look(world_size=2, options=options, folder=tmp_path)


@on_ranks(2)
def _load_over_other_state(folder):
    """What the checkpoint has no state of has none afterwards; options come along."""
    parameters = make_model()
    run = Run(ELEMENT)
    zero = run.sharded(parameters)
    train(parameters, zero, 0, 1)
    zero.param_groups[1]["lr"] = 0.025
    zero.param_groups[1]["initial_lr"] = 0.5
    dcp.save(zero.sharded_state_dict(), checkpoint_id=folder)
    before = consolidated(zero)

    other = run.sharded(copies(make_model()))
    for parameter in other._all_params:
        parameter.grad = torch.ones_like(parameter)
    other.step()
    state = other.sharded_state_dict()
    dcp.load(state, checkpoint_id=folder)
    other.load_sharded_state_dict(state)
    after = consolidated(other)
    if before is not None:
        assert NEVER_USED not in after["state"]
        assert after["param_groups"][1]["initial_lr"] == 0.5
        assert_same(after, before)


def test_state_that_is_there_is_replaced(tmp_path):
    _load_over_other_state(world_size=2, folder=tmp_path)


@on_ranks(2)
def _round_trip_before_the_first_step(options, folder):
    zero = Run(options).sharded(make_model())
    dcp.save(zero.sharded_state_dict(), checkpoint_id=folder)
    other = Run(options).sharded(make_model(), lr=7.0)
    state = other.sharded_state_dict()
    dcp.load(state, checkpoint_id=folder)
    other.load_sharded_state_dict(state)
    assert not other.optim.state
    assert [group["lr"] for group in other.param_groups] == [0.03, 0.1]


@every_sharding
def test_before_the_first_step_there_is_none(options, tmp_path):
    _round_trip_before_the_first_step(world_size=2, options=options, folder=tmp_path)


@on_ranks(2)
def _save_behind_the_scenes(options, folder, writer):
    parameters = make_model()
    zero = Run(options).sharded(parameters)
    train(parameters, zero, 0, 3)
    where = (
        {"storage_writer": dcp.FileSystemWriter(folder)} if writer else {"checkpoint_id": folder}
    )
    group = dist.new_group(backend="gloo")
    saving = dcp.async_save(zero.sharded_state_dict(), process_group=group, **where)
    train(parameters, zero, 3, 5)
    saving.result(timeout=30)

    other = Run(options).sharded(make_model())
    state = other.sharded_state_dict()
    dcp.load(state, checkpoint_id=folder)
    other.load_sharded_state_dict(state)
    check_loaded(other, Run(options).plain(3)[1])


@pytest.mark.parametrize("writer", [False, True], ids=["default stager", "writer's stager"])
@every_sharding
def test_async_save_has_the_state_at_the_call(options, tmp_path, writer):
    _save_behind_the_scenes(world_size=2, options=options, folder=tmp_path, writer=writer)


@on_ranks(2)
def _load_what_does_not_fit(folder):
    parameters = make_model()
    zero = Run(PARAMETER).sharded(parameters)
    train(parameters, zero, 0, 1)
    dcp.save(zero.sharded_state_dict(), checkpoint_id=folder / "adam")
    amsgrad = Run(PARAMETER, defaults={"amsgrad": True})
    other = amsgrad.sharded(parameters)
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key.*max_exp_avg_sq"):
        dcp.load(other.sharded_state_dict(), checkpoint_id=folder / "adam")

    train(parameters, other, 0, 1)
    dcp.save(other.sharded_state_dict(), checkpoint_id=folder / "amsgrad")
    state = zero.sharded_state_dict()
    dcp.load(state, checkpoint_id=folder / "amsgrad")
    with pytest.raises(
        ValueError, match=r"expected max_exp_avg_sq of parameter \d+ .*rank \d of 2"
    ):
        zero.load_sharded_state_dict(state)

    wider = ZeroRedundancyOptimizer(make_parameters(10, (3, 5)), torch.optim.Adam)
    with pytest.raises(dcp.api.CheckpointException, match="Size mismatch"):
        dcp.load(wider.sharded_state_dict(), checkpoint_id=folder / "adam")
    fewer = ZeroRedundancyOptimizer(make_parameters(9, (3, 5)), torch.optim.Adam)
    state = fewer.sharded_state_dict()
    dcp.load(state, checkpoint_id=folder / "adam")
    with pytest.raises(ValueError, match="expected 1 param groups, got 2"):
        fewer.load_sharded_state_dict(state)


def test_what_does_not_fit_is_refused(tmp_path):
    _load_what_does_not_fit(world_size=2, folder=tmp_path)


@on_ranks(2)
def _save_and_load_strictly(folder):
    parameters = make_model()
    zero = Run(ELEMENT).sharded(parameters)
    train(parameters, zero, 0, 1)
    state = zero.sharded_state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("error", DeprecationWarning)
        dcp.save(state, checkpoint_id=folder)
        dcp.load(state, checkpoint_id=folder)


def test_nothing_is_used_that_is_on_its_way_out(tmp_path):
    _save_and_load_strictly(world_size=2, folder=tmp_path)
