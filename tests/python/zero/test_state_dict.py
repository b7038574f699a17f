"""Saving and loading state as a plain optimizer's dict."""

import copy

import device as devices
import pytest
import torch
import torch.distributed as dist
from helpers import (
    Twins,
    assert_bitwise,
    assert_same,
    consolidated,
    copies,
    every_layout,
    every_sharding,
    everywhere,
    gathered,
    make_parameters,
    on_ranks,
    ours,
    said_elementwise,
    set_gradients,
)
from implementation import ZeroRedundancyOptimizer
from ranks import run_ranks
from torch import nn

SHAPES = (9, (3, 5), 7, (2, 2), 40)
GROUPS = [{"count": 2, "lr": 0.3}, {"count": 3, "weight_decay": 0.1}]


def make_twins(optimizer_class=torch.optim.Adam, options=None, **defaults):
    parameters = make_parameters(*SHAPES)
    return Twins(optimizer_class, parameters, groups=GROUPS, options=options, **defaults)


@every_layout
@on_ranks(1, 2, 3, 4)
def test_it_equals_the_plain_optimizers(options):
    """Key for key, shape for shape and bit for bit; on each rank that asks for it."""
    twins = make_twins(options=options, amsgrad=True)
    for steps in (0, 1, 2):
        twins.step(steps)
        for to in range(dist.get_world_size()):
            state = consolidated(twins.zero, to)
            if state is not None:
                assert_same(state, twins.plain.state_dict())
                assert list(state) == ["state", "param_groups"]
                assert list(state["state"]) == ([0, 1, 2, 3, 4] if steps else [])


STATEFUL = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (torch.optim.NAdam, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}),
]


@every_sharding
@on_ranks(2)
def test_it_equals_that_of_any_optimizer(options):
    for optimizer_class, defaults in STATEFUL:
        twins = make_twins(optimizer_class, options, **defaults)
        twins.step(2)
        state = everywhere(twins.zero)
        try:
            assert_same(state, twins.plain.state_dict())
        except AssertionError as error:
            raise AssertionError(f"{optimizer_class.__name__} {defaults}") from error


@every_sharding
@on_ranks(2)
def test_parameters_that_never_had_a_gradient_have_no_state(options):
    twins = make_twins(options=options)
    for number in range(2):
        twins.set_gradients(number)
        twins.sharded[1].grad = twins.unsharded[1].grad = None
        twins.zero.step()
        twins.plain.step()
    state = everywhere(twins.zero)
    assert list(state["state"]) == [0, 2, 3, 4]
    assert_same(state, twins.plain.state_dict())
    twins.zero.load_state_dict(state)
    twins.plain.load_state_dict(twins.plain.state_dict())
    twins.step(2, seed=3)


@every_sharding
@on_ranks(2, 4)
def test_elsewhere_it_says_to_consolidate(options):
    twins = make_twins(options=options)
    twins.step(1)
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        twins.zero.state_dict()
    last = dist.get_world_size() - 1
    twins.zero.consolidate_state_dict(to=last)
    if dist.get_rank() == last:
        assert len(twins.zero.state_dict()["state"]) == 5
    else:
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            twins.zero.state_dict()
    # On another rank now, and no longer there; the default is rank 0.
    twins.zero.consolidate_state_dict()
    if dist.get_rank() == 0:
        assert len(twins.zero.state_dict()["state"]) == 5
    else:
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            twins.zero.state_dict()


@ours
@every_sharding
@on_ranks(2, 4)
def test_consolidating_returns_it(options):
    twins = make_twins(options=options)
    twins.step(2)
    for to in range(dist.get_world_size()):
        state = twins.zero.consolidate_state_dict(to=to)
        if dist.get_rank() == to:
            assert_same(state, twins.plain.state_dict())
            assert_same(twins.zero.state_dict(), state)
        else:
            assert state is None


@ours
@on_ranks(2)
def test_consolidating_to_no_rank_is_refused():
    twins = make_twins()
    twins.step(1)
    for to in (-1, 2):
        with pytest.raises(ValueError, match=str(to)):
            twins.zero.consolidate_state_dict(to=to)
    assert len(everywhere(twins.zero)["state"]) == 5


@every_sharding
@on_ranks(2)
def test_options_that_changed_since_the_last_step_are_in_it(options):
    twins = make_twins(options=options)
    twins.step(1)
    for optimizer in (twins.zero, twins.plain):
        optimizer.param_groups[0]["lr"] = 0.0125
        optimizer.param_groups[1]["initial_lr"] = 7
    assert_same(everywhere(twins.zero), twins.plain.state_dict())


@every_layout
@on_ranks(1, 2, 4)
def test_a_plain_dict_is_taken(options):
    """Training that continues from it equals the plain optimizer's, and so does the state."""
    plain = make_parameters(*SHAPES)
    optimizer = torch.optim.Adam(plain, lr=0.2, amsgrad=True)
    for number in range(3):
        set_gradients(plain, number)
        optimizer.step()
    twins = Twins(parameters=copies(plain), options=options, amsgrad=True)
    for either in (twins.zero, twins.plain):
        either.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert either.param_groups[0]["lr"] == 0.2
    assert twins.zero.optim.param_groups[0]["lr"] == 0.2
    assert_same(everywhere(twins.zero), optimizer.state_dict())
    twins.step(3, seed=5)


@every_sharding
@on_ranks(2, 4)
def test_each_rank_keeps_its_shard_only(options):
    twins = make_twins(options=options)
    twins.step(1)

    def kept():
        states = (*twins.zero.optim.state.values(), *twins.zero.state.values())
        values = [value for state in states for value in (state or {}).values()]
        tensors = {id(v): v for v in values if isinstance(v, torch.Tensor) and v.dim() > 0}
        return sum(tensor.numel() for tensor in tensors.values())

    before = kept()
    state = everywhere(twins.zero)
    whole = sum(2 * s["exp_avg"].numel() for s in state["state"].values())
    assert sum(gathered(before)) == whole
    twins.zero.load_state_dict(copy.deepcopy(state))
    assert kept() == before


@ours
@every_sharding
@on_ranks(2)
def test_the_callers_dict_is_left_as_it_was(options):
    twins = make_twins(options=options)
    twins.step(2)
    state = everywhere(twins.zero)
    kept = copy.deepcopy(state)
    twins.zero.load_state_dict(state)
    assert_same(state, kept)
    twins.step(2, seed=1)
    assert_same(state, kept)


@every_layout
@on_ranks(2, 4)
def test_plain_and_sharded_swap_their_states_in_training(options):
    twins = make_twins(options=options)
    for round_ in range(3):
        twins.step(2, seed=round_)
        mine, plain = everywhere(twins.zero), copy.deepcopy(twins.plain.state_dict())
        twins.zero.load_state_dict(plain)
        twins.plain.load_state_dict(mine)
    twins.step(2, seed=7)


@every_sharding
@on_ranks(2)
def test_a_fresh_optimizer_goes_on_where_the_saved_one_stopped(options):
    """Restored beside the parameters: bit for bit the run that was never interrupted."""
    for optimizer_class, defaults in [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"fused": True, "amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.Adam, {"foreach": False}),
        (torch.optim.NAdam, {}),
        (torch.optim.ASGD, {}),
    ]:
        twins = make_twins(optimizer_class, options, **defaults)
        twins.step(2)
        restored = Twins(
            optimizer_class, copies(twins.sharded), groups=GROUPS, options=options, **defaults
        )
        state = everywhere(twins.zero)
        restored.zero.load_state_dict(copy.deepcopy(state))
        restored.plain.load_state_dict(copy.deepcopy(state))
        for number in range(2):
            twins.step(1, seed=10 + number)
            restored.step(1, seed=10 + number)
            assert_bitwise(restored.sharded, twins.sharded)
        assert_same(everywhere(restored.zero), everywhere(twins.zero))


class Counting(torch.optim.Optimizer):
    """Keeps its step counters in the ways that optimizers do, and depends on each of them."""

    def __init__(self, params, lr, counter):
        super().__init__(params, {"lr": lr, "counter": counter})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"] = {
                        "number": 0,
                        "float": torch.tensor(0.0),
                        "double": torch.tensor(0.0, dtype=torch.float64),
                        "integer": torch.tensor(0),
                        "vector": torch.zeros(1),
                    }[group["counter"]]
                state["step"] += 1
                parameter.sub_(parameter.grad, alpha=group["lr"] / float(state["step"]))


@pytest.mark.parametrize(
    "counter", ["number", "float", "double", "integer", pytest.param("vector", marks=ours)]
)
@every_sharding
@on_ranks(2)
def test_step_counters_of_any_kind_go_on(counter, options):
    options = said_elementwise(options)
    twins = Twins(Counting, options=options, counter=counter)
    twins.step(2)
    state = everywhere(twins.zero)
    assert_same(state, twins.plain.state_dict())
    restored = Twins(Counting, copies(twins.sharded), options=options, counter=counter)
    restored.zero.load_state_dict(copy.deepcopy(state))
    restored.plain.load_state_dict(copy.deepcopy(state))
    restored.step(2, seed=1)
    assert_same(everywhere(restored.zero), restored.plain.state_dict())


def trained_state(options):
    twins = make_twins(options=options)
    twins.step(3)
    return twins.sharded, consolidated(twins.zero)


def goes_on_as_the_plain_one(options, parameters, state):
    # Tensors among a process's arguments are in memory that all ranks share, or on one's device.
    parameters = [nn.Parameter(p.detach().to(devices.current())) for p in copies(parameters)]
    twins = Twins(parameters=parameters, groups=GROUPS, options=options)
    twins.zero.load_state_dict(copy.deepcopy(state))
    twins.plain.load_state_dict(copy.deepcopy(state))
    twins.step(3, seed=8)
    assert_same(everywhere(twins.zero), twins.plain.state_dict())


@pytest.mark.part(8)
@pytest.mark.parametrize("saved, loaded", [(4, 2), (2, 3), (1, 4), (3, 1)])
@pytest.mark.parametrize(
    "from_options, to_options",
    [
        pytest.param({}, {}, id="parameter"),
        pytest.param({"sharding": "element"}, {}, marks=ours, id="element-to-parameter"),
        pytest.param({}, {"sharding": "element"}, marks=ours, id="parameter-to-element"),
        pytest.param(
            {"sharding": "element"},
            {"sharding": "element", "parameters_as_bucket_view": True},
            marks=ours,
            id="element",
        ),
    ],
)
def test_saved_at_one_world_size_loaded_at_another(saved, loaded, from_options, to_options):
    parameters, state = run_ranks(saved, trained_state, from_options)[0]
    run_ranks(loaded, goes_on_as_the_plain_one, to_options, parameters, state)


@on_ranks(2)
def test_it_survives_a_file(tmp_path):
    twins = make_twins()
    twins.step(2)
    state = consolidated(twins.zero)
    if state is not None:
        torch.save(state, tmp_path / "state.pt")
    dist.barrier()
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert_same(loaded, twins.plain.state_dict())
    twins.zero.load_state_dict(loaded)
    twins.step(2, seed=1)


@every_sharding
@on_ranks(2)
def test_options_come_with_the_state(options):
    twins = make_twins(options=options)
    twins.step(1)
    state = everywhere(twins.zero)
    state["param_groups"][0].update(lr=0.75, weight_decay=0.5)
    state["param_groups"][1]["label"] = "second"
    twins.zero.load_state_dict(copy.deepcopy(state))
    twins.plain.load_state_dict(copy.deepcopy(state))
    first, second = twins.zero.param_groups
    assert (first["lr"], first["weight_decay"], second["label"]) == (0.75, 0.5, "second")
    assert [id(p) for p in first["params"]] == [id(p) for p in twins.sharded[:2]]
    assert twins.zero.optim.param_groups[0]["lr"] == 0.75
    twins.step(2)


def misfits(state):
    """Dicts that do not fit, and what an error should name."""
    fewer = copy.deepcopy(state)
    fewer["param_groups"].pop()
    yield fewer, "group"
    shorter = copy.deepcopy(state)
    shorter["param_groups"][1]["params"].pop()
    yield shorter, "group"


def ill_shaped(state):
    wrong = copy.deepcopy(state)
    wrong["state"][1]["exp_avg"] = torch.zeros(5, 3)
    yield wrong, "exp_avg"
    wrong = copy.deepcopy(state)
    wrong["state"][4]["exp_avg_sq"] = torch.zeros(41)
    yield wrong, "exp_avg_sq"
    wrong = copy.deepcopy(state)
    wrong["state"][5] = wrong["state"].pop(4)
    yield wrong, "5"


def refuses_and_keeps(twins, wrong, named):
    before = everywhere(twins.zero)
    with pytest.raises(ValueError, match=named):
        twins.zero.load_state_dict(wrong)
    assert_same(everywhere(twins.zero), before)
    twins.step(1, seed=4)


@every_sharding
@on_ranks(2)
def test_other_groups_are_refused(options):
    twins = make_twins(options=options)
    twins.step(2)
    for wrong, named in misfits(everywhere(twins.zero)):
        with pytest.raises(ValueError, match=named):
            twins.zero.load_state_dict(wrong)


@ours
@every_sharding
@on_ranks(2, timeout=30)
def test_what_does_not_fit_changes_nothing(options):
    twins = make_twins(options=options)
    twins.step(2)
    state = everywhere(twins.zero)
    for source in (misfits, ill_shaped):
        for wrong, named in source(state):
            wrong["param_groups"][0]["lr"] = 0.9
            refuses_and_keeps(twins, wrong, named)
            assert twins.zero.param_groups[0]["lr"] == 0.3


@ours
@on_ranks(2, timeout=30)
def test_what_is_no_state_is_refused():
    twins = make_twins()
    twins.step(1)
    for wrong in ({}, {"state": {}}, {"param_groups": []}):
        with pytest.raises((ValueError, KeyError)):
            twins.zero.load_state_dict(wrong)
    twins.step(1)


class Labelled(ZeroRedundancyOptimizer):
    """Adds to the dict what it wants saved, as people do."""

    def __init__(self, *args, label, **kwargs):
        super().__init__(*args, **kwargs)
        self.label = label

    def state_dict(self):
        state = super().state_dict()
        state["label"] = self.label
        return state

    def load_state_dict(self, state_dict):
        state_dict = dict(state_dict)
        self.label = state_dict.pop("label")
        super().load_state_dict(state_dict)


@every_sharding
@on_ranks(2)
def test_subclass_that_extends_the_dict(options):
    twins = make_twins()
    zero, other = (
        Labelled(copies(twins.sharded), torch.optim.Adam, lr=0.1, label=label, **options)
        for label in ("one", "two")
    )
    assert isinstance(zero, ZeroRedundancyOptimizer)
    set_gradients(zero.param_groups[0]["params"], 0)
    zero.step()
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        zero.state_dict()
    state = everywhere(zero)
    assert list(state) == ["state", "param_groups", "label"]
    other.load_state_dict(copy.deepcopy(state))
    assert other.label == "one"
    assert_same(everywhere(other), state)


class Collecting(ZeroRedundancyOptimizer):
    """Consolidates by itself, so that a trainer's optimizer.state_dict() just works."""

    def state_dict(self):
        self.consolidate_state_dict(to=0)
        return super().state_dict() if self.rank == 0 else {}


@every_sharding
@on_ranks(2, timeout=20)
def test_subclass_that_consolidates_by_itself(options):
    parameters = make_parameters(*SHAPES)
    others = copies(parameters)
    zero = Collecting(parameters, torch.optim.Adam, lr=0.1, **options)
    plain = torch.optim.Adam(others, lr=0.1)
    for optimizer, own in ((zero, parameters), (plain, others)):
        set_gradients(own, 0)
        optimizer.step()
    state = zero.state_dict()
    assert_same(state, plain.state_dict() if dist.get_rank() == 0 else {})


@on_ranks(2)
def test_hooks_of_state_dict_and_load_state_dict():
    twins = make_twins()
    twins.step(1)
    calls = []
    twins.zero.register_state_dict_pre_hook(lambda optimizer: calls.append("before saving"))
    twins.zero.register_state_dict_post_hook(lambda optimizer, state: calls.append("saved"))
    twins.zero.register_load_state_dict_pre_hook(lambda optimizer, state: calls.append("loading"))
    twins.zero.register_load_state_dict_post_hook(lambda optimizer: calls.append("loaded"))
    twins.zero.consolidate_state_dict(to=0)
    assert calls == []
    if dist.get_rank() == 0:
        twins.zero.state_dict()
        assert calls == ["before saving", "saved"]
        calls.clear()
    twins.zero.load_state_dict(copy.deepcopy(twins.plain.state_dict()))
    assert calls == ["loading", "loaded"]


@ours
@pytest.mark.parametrize("exchange", ["pairwise", "shared_memory"])
@on_ranks(2, 3)
def test_state_of_another_dtype_on_one_rank_is_an_error_on_every_rank(exchange):
    """Its bytes would be taken for those of the others' dtype."""
    net = nn.Linear(64, 64)
    zero = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.AdamW, sharding="element", exchange=exchange, lr=1e-3
    )
    set_gradients(net.parameters(), 0)
    zero.step()
    for dtype in (torch.float64, torch.float16, torch.float32):
        if dist.get_rank() == 1:
            for state in zero.optim.state.values():
                state["exp_avg"] = state["exp_avg"].to(dtype)
        if dtype == torch.float32:
            zero.consolidate_state_dict(0)
            break
        expected = "exp_avg"
        if dist.get_rank() == 0:
            expected = r'"exp_avg" of parameter 0 .*one dtype.*Float.*rank 0.*on rank 1 \(rank'
        with pytest.raises(ValueError, match=expected):
            zero.consolidate_state_dict(0)
