"""State that is not a dict of plain tensors: consolidated, saved and loaded as by torch's class and
torch.distributed.checkpoint, or refused by name."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import (
    assert_bitwise,
    assert_same,
    copies,
    everywhere,
    gathered,
    make_parameters,
    on_ranks,
    set_gradients,
)
from shardstep import ZeroRedundancyOptimizer
from shardstep._C import Checkpoint, export_state_dict, import_state_dict
from simple_optimizer import SimpleOptimizer
from torch.utils._pytree import tree_map


class Quantized(torch.Tensor):
    """A tensor without storage, as torchao's 8-bit states: codes and a scale."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, tensor):
        scale = tensor.abs().max().clamp(min=1e-12) / 127
        return cls((tensor / scale).round().to(torch.int8), scale)

    def dequantize(self):
        return self.codes.float() * self.scale

    def __repr__(self):
        return f"Quantized({self.codes}, {self.scale})"

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _, size, stride):
        return cls(**inner)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            self = args[0]
            return cls(func(self.codes), func(self.scale))
        if func is aten.copy_.default:
            source = args[1] if isinstance(args[1], cls) else cls.of(args[1])
            args[0].codes.copy_(source.codes)
            args[0].scale.copy_(source.scale)
            return args[0]
        raise NotImplementedError(f"{func} of a Quantized tensor")


class EightBit(SimpleOptimizer):
    """Momentum kept in eight bits."""

    def update(self, p, state, lr):
        old = state[p]["momentum"].dequantize() if p in state else torch.zeros_like(p)
        new = 0.9 * old + p.grad
        state[p]["momentum"] = Quantized.of(new)
        p.sub_(lr * new)


class Factors(SimpleOptimizer):
    """A list of matrices per parameter, as SOAP and Shampoo keep them, and a dict of tensors."""

    def update(self, p, state, lr):
        own = state[p]
        if not own:
            own["step"] = 0
            own["factors"] = [torch.zeros(size, size) for size in p.shape] + [[]]
            own["means"] = {"first": torch.zeros_like(p), "count": 0}
        own["step"] += 1
        for axis, factor in enumerate(own["factors"][:-1]):
            rows = p.grad.movedim(axis, 0).flatten(1)
            factor += rows @ rows.T
        own["means"]["first"].add_(p.grad)
        own["means"]["count"] += 1
        p.sub_(lr * own["means"]["first"])


class Float8(SimpleOptimizer):
    """Momentum in a dtype that has no typed storage, by itself and in a list."""

    def update(self, p, state, lr):
        old = state[p]["momentum"].float() if p in state else torch.zeros_like(p)
        new = 0.9 * old + p.grad
        state[p]["momentum"] = new.to(torch.float8_e4m3fn)
        state[p]["before"] = [old.to(torch.float8_e5m2)]
        p.sub_(lr * new)


class Hidden(SimpleOptimizer):
    """Says something else in state_dict() than what it keeps, as bitsandbytes' classes do."""

    def update(self, p, state, lr):
        state[p]["kept"] = state[p].get("kept", 0) + p.grad
        p.sub_(lr * state[p]["kept"])

    def state_dict(self):
        packed = super().state_dict()
        packed["state"] = {
            key: {"told": 2 * values["kept"]} for key, values in packed["state"].items()
        }
        return packed

    def load_state_dict(self, state_dict):
        state_dict = copy.deepcopy(state_dict)
        state_dict["state"] = {
            key: {"kept": values["told"] / 2} for key, values in state_dict["state"].items()
        }
        super().load_state_dict(state_dict)


class TouchesState(torch.optim.SGD):
    """Leaves an empty dict for each parameter."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]
        return super().step(closure)


SHAPES = ((3, 5), (4, 2), (2, 2))
EVERY = {c.__name__: c for c in (EightBit, Factors, Float8, Hidden, TouchesState)}
DCP_TAKES = ["EightBit", "Factors", "Hidden"]


def stepped(optimizer, parameters, steps=2):
    for seed in range(steps):
        set_gradients(parameters, seed)
        optimizer.step()


def twins(name):
    """Ours and the plain optimizer, after two steps."""
    sharded = make_parameters(*SHAPES)
    unsharded = copies(sharded)
    zero = ZeroRedundancyOptimizer(sharded, EVERY[name], lr=0.1)
    plain = EVERY[name](unsharded, lr=0.1)
    stepped(zero, sharded)
    stepped(plain, unsharded)
    assert_bitwise(sharded, unsharded)
    return zero, plain


def dense(state):
    """With codes for what is quantized, so that it can be compared."""
    return tree_map(lambda t: t.dequantize() if isinstance(t, Quantized) else t, state)


@pytest.mark.parametrize("name", EVERY)
@on_ranks(2, 3)
def test_consolidates_as_the_plain_optimizers(name):
    zero, plain = twins(name)
    assert_same(dense(everywhere(zero)), dense(plain.state_dict()))


@pytest.mark.parametrize("name", EVERY)
@on_ranks(2)
def test_loads_what_was_consolidated(name):
    zero, plain = twins(name)
    state = everywhere(zero)
    zero.load_state_dict(plain.state_dict())
    stepped(zero, zero.param_groups[0]["params"], 1)
    stepped(plain, plain.param_groups[0]["params"], 1)
    assert_bitwise(zero.param_groups[0]["params"], plain.param_groups[0]["params"])
    zero.load_state_dict(state)


@pytest.mark.parametrize("name", DCP_TAKES)
@on_ranks(2, timeout=120)
def test_dcp_loads_into_a_fresh_optimizer(name, tmp_path):
    zero, plain = twins(name)
    dcp.save({"optimizer": zero.sharded_state_dict()}, checkpoint_id=tmp_path)
    fresh = ZeroRedundancyOptimizer(copies(zero.param_groups[0]["params"]), EVERY[name], lr=0.1)
    state = {"optimizer": fresh.sharded_state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    fresh.load_sharded_state_dict(state["optimizer"])
    assert_same(dense(everywhere(fresh)), dense(plain.state_dict()))
    for optimizer in (fresh, plain):
        stepped(optimizer, optimizer.param_groups[0]["params"], 1)
    assert_bitwise(fresh.param_groups[0]["params"], plain.param_groups[0]["params"])


def saved_by(zero, folder):
    """A checkpoint, on every rank's disk."""
    directory = [str(folder / "checkpoint")]
    dist.broadcast_object_list(directory)
    zero.save_checkpoint(directory[0])
    return directory[0]


@pytest.mark.parametrize("name", EVERY)
@on_ranks(2)
def test_a_checkpoint_brings_it_back(name, tmp_path):
    zero, plain = twins(name)
    directory = saved_by(zero, tmp_path)
    fresh = ZeroRedundancyOptimizer(copies(zero.param_groups[0]["params"]), EVERY[name], lr=0.1)
    fresh.load_checkpoint(directory)
    assert_same(dense(everywhere(fresh)), dense(plain.state_dict()))
    for optimizer in (fresh, plain):
        stepped(optimizer, optimizer.param_groups[0]["params"], 1)
    assert_bitwise(fresh.param_groups[0]["params"], plain.param_groups[0]["params"])
    # At another world size.
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    small = ZeroRedundancyOptimizer(
        copies(zero.param_groups[0]["params"]), EVERY[name], process_group=alone, lr=0.1
    )
    small.load_checkpoint(directory)
    assert_same(dense(everywhere(small)["state"]), dense(everywhere(zero)["state"]))


class Opaque(Quantized):
    """Does not say what it consists of."""

    __tensor_flatten__ = None


@on_ranks(2)
def test_a_checkpoint_refuses_tensors_that_do_not_say_what_they_consist_of(tmp_path):
    zero, _ = twins("EightBit")
    for values in zero.optim.state.values():
        values["momentum"].__class__ = Opaque
    with pytest.raises(TypeError, match=r"momentum.*Opaque"):
        zero.save_checkpoint(tmp_path / "checkpoint")
    plain = ZeroRedundancyOptimizer(make_parameters(3), torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match=r"extra.*Quantized"):
        plain.save_checkpoint(tmp_path / "other", extra={"q": Quantized.of(torch.ones(3))})


@on_ranks(2)
def test_by_element_tensors_without_storage_are_refused_by_name(tmp_path):
    parameters = make_parameters(*SHAPES)
    zero = ZeroRedundancyOptimizer(
        parameters, EightBit, lr=0.1, sharding="element", elementwise=True
    )
    stepped(zero, parameters)
    with pytest.raises(TypeError, match=r"momentum.*Quantized.*shard by parameter"):
        zero.consolidate_state_dict()
    with pytest.raises(TypeError, match=r"momentum.*Quantized.*shard by parameter"):
        zero.sharded_state_dict()
    with pytest.raises(TypeError, match=r"momentum.*Quantized.*shard by parameter"):
        zero.save_checkpoint(tmp_path / "refused")
    by_parameter, _ = twins("EightBit")
    directory = saved_by(by_parameter, tmp_path)
    with pytest.raises(ValueError, match=r"by element, got momentum; shard by parameter"):
        zero.load_checkpoint(directory)


@on_ranks(2)
def test_a_checkpoint_imports_nothing(tmp_path):
    zero, _ = twins("EightBit")
    for values in zero.optim.state.values():
        values["momentum"].__class__ = type("Gone", (Quantized,), {"__module__": "nowhere"})
    directory = saved_by(zero, tmp_path)
    with pytest.raises(ValueError, match=r"Gone of nowhere.* import the optimizer's package"):
        zero.load_checkpoint(directory)


class KeepsFunctions(torch.optim.SGD):
    """On one rank its state holds what cannot be pickled."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["callback"] = (lambda: None) if dist.get_rank() == 1 else None
        return super().step(closure)


@on_ranks(3, timeout=30)
def test_state_that_one_rank_cannot_send_is_an_error_on_all():
    parameters = make_parameters(*SHAPES)
    zero = ZeroRedundancyOptimizer(parameters, KeepsFunctions, lr=0.1)
    stepped(zero, parameters)
    with pytest.raises(Exception, match=r"pickle") as caught:
        zero.consolidate_state_dict()
    said = gathered(str(caught.value))
    assert "rank 1" in said[0] and "rank 1" in said[2]
    stepped(zero, parameters)


@on_ranks(2)
def test_a_state_dict_with_names_for_parameters_is_refused():
    zero, plain = twins("Hidden")
    state = plain.state_dict()
    state["param_groups"][0]["params"] = ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"by number.*got 'a' \(rank \d of 2\)"):
        zero.load_state_dict(state)


class Narrow(torch.optim.SGD):
    """Has a dtype among its options, as optimizers with a dtype for their state do."""

    def __init__(self, params, lr=0.1, state_dtype=torch.bfloat16):
        super().__init__(params, lr=lr, momentum=0.9)
        for group in self.param_groups:
            group.setdefault("state_dtype", state_dtype)


@on_ranks(2)
def test_a_checkpoint_carries_dtypes_among_options(tmp_path):
    parameters = make_parameters(*SHAPES)
    zero = ZeroRedundancyOptimizer(parameters, Narrow, lr=0.1)
    stepped(zero, parameters)
    before = everywhere(zero)
    extra = {"dtype": torch.float16, "all": [torch.int64, (torch.bool,)]}
    zero.save_checkpoint(tmp_path / "checkpoint", extra=extra)
    zero.param_groups[0]["state_dtype"] = torch.float32
    assert zero.load_checkpoint(tmp_path / "checkpoint") == extra
    assert zero.param_groups[0]["state_dtype"] is torch.bfloat16
    assert_same(everywhere(zero), before)
    if zero.rank == 0:
        file, back = str(tmp_path / "narrow.pt"), tmp_path / "back"
        export_state_dict(str(tmp_path / "checkpoint"), file)
        assert_same(torch.load(file, weights_only=True), before)
        import_state_dict(file, str(back))
        assert_same(Checkpoint(str(back)).state_dict(), before)
