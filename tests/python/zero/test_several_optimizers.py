"""Param groups that name their own optimizer, sharding and cost: one object equals two plain
optimizers on the same gradients, bit for bit."""

import pytest
import torch
import torch.distributed as dist
from helpers import (
    assert_bitwise,
    assert_same,
    copies,
    everywhere,
    make_parameters,
    on_ranks,
    set_gradients,
)
from shardstep import ZeroRedundancyOptimizer, muon_groups
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

Muon = torch.optim.Muon
MATRICES = [(6, 4), (4, 8), (5, 5)]
OTHERS = [(9,), (7, 3), (4,)]


class TwoPlain:
    """Muon over matrices and AdamW over the rest, beside one ZeroRedundancyOptimizer over both."""

    def __init__(self, **options):
        self.matrices, self.others = make_parameters(*MATRICES), make_parameters(*OTHERS, seed=2)
        self.plain_matrices, self.plain_others = copies(self.matrices), copies(self.others)
        self.muon = Muon(self.plain_matrices, lr=0.02, weight_decay=0.01)
        self.adamw = torch.optim.AdamW(self.plain_others, lr=0.01)
        self.zero = ZeroRedundancyOptimizer(
            [
                {"params": self.others},
                {
                    "params": self.matrices,
                    "optimizer_class": Muon,
                    "lr": 0.02,
                    "weight_decay": 0.01,
                },
            ],
            torch.optim.AdamW,
            lr=0.01,
            **options,
        )

    @property
    def sharded(self):
        return [*self.others, *self.matrices]

    @property
    def plain(self):
        return [*self.plain_others, *self.plain_matrices]

    def backward(self, number):
        """The same gradients on every rank, so that both stages see the same average."""
        for parameters in (self.sharded, self.plain):
            self.loss_of(parameters, number).backward()

    @staticmethod
    def loss_of(parameters, number):
        factors = make_parameters(*(p.shape for p in parameters), seed=10 + number)
        return sum((p * f.detach()).sum() for p, f in zip(parameters, factors, strict=True))

    def step(self, number):
        self.zero.zero_grad()
        self.muon.zero_grad()
        self.adamw.zero_grad()
        self.backward(number)
        self.zero.step()
        self.muon.step()
        self.adamw.step()
        assert_bitwise(self.sharded, self.plain)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("sharding", ["parameter", "element"])
@on_ranks(1, 2, 4)  # equal gradients have themselves as their average
def test_one_object_equals_two_plain_optimizers(stage, sharding):
    both = TwoPlain(stage=stage, sharding=sharding)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (both.zero, both.muon, both.adamw)
    ]
    for number in range(4):
        both.step(number)
        for scheduler in schedulers:
            scheduler.step()
    assert isinstance(both.zero.optim, torch.optim.Optimizer)
    assert "betas" in both.zero.param_groups[0] and "betas" not in both.zero.param_groups[1]
    assert both.zero.param_groups[1]["ns_steps"] == 5


@on_ranks(2)
def test_clipping_is_over_all_gradients():
    both = TwoPlain(stage=2, sharding="element")
    for number in range(2):
        both.zero.zero_grad()
        both.muon.zero_grad()
        both.adamw.zero_grad()
        both.backward(number)
        norm = both.zero.clip_grad_norm_(0.5)
        expected = torch.nn.utils.clip_grad_norm_(both.plain, 0.5)
        torch.testing.assert_close(norm.float(), expected)
        both.zero.step()
        both.muon.step()
        both.adamw.step()
        for left, right in zip(both.sharded, both.plain, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-2, atol=1e-4)


@on_ranks(2)
def test_a_scaler_skips_both_or_none():
    both = TwoPlain(stage=2, sharding="element")
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    for number in range(3):
        overflows = number == 1  # on one rank, in one gradient of AdamW's
        factor = torch.inf if overflows and dist.get_rank() == 1 else 0.0
        both.zero.zero_grad()
        scaler.scale(both.loss_of(both.sharded, number) + factor * both.others[0].sum()).backward()
        scaler.step(both.zero)
        scaler.update()
        if not overflows:
            both.muon.zero_grad()
            both.adamw.zero_grad()
            both.loss_of(both.plain, number).backward()
            both.muon.step()
            both.adamw.step()
        assert_bitwise(both.sharded, both.plain)
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("way", ["state_dict", "checkpoint", "sharded"])
@on_ranks(2)
def test_state_of_all_is_one(way, tmp_path):
    both = TwoPlain(stage=2, sharding="element")
    for number in range(2):
        both.step(number)
    state = everywhere(both.zero)
    for index, plain in enumerate([both.adamw, both.muon]):
        first = 3 * index
        expected = plain.state_dict()["state"]
        assert_same({k: state["state"][first + k] for k in expected}, expected)
    again = TwoPlain(stage=1, sharding="parameter")
    with torch.no_grad():
        for mine, theirs in zip(
            again.sharded + again.plain, both.sharded + both.plain, strict=True
        ):
            mine.copy_(theirs)
    again.muon.load_state_dict(both.muon.state_dict())
    again.adamw.load_state_dict(both.adamw.state_dict())
    if way == "state_dict":
        again.zero.load_state_dict(state)
    else:
        folder = [str(tmp_path / way)]
        dist.broadcast_object_list(folder)
        if way == "checkpoint":
            both.zero.save_checkpoint(folder[0])
            again.zero.load_checkpoint(folder[0])
        else:
            import torch.distributed.checkpoint as dcp

            dcp.save({"optim": both.zero.sharded_state_dict()}, checkpoint_id=folder[0])
            wanted = {"optim": again.zero.sharded_state_dict()}
            dcp.load(wanted, checkpoint_id=folder[0])
            again.zero.load_sharded_state_dict(wanted["optim"])
    for number in range(2, 4):
        again.step(number)


@on_ranks(2)
def test_a_group_with_its_own_optimizer_can_be_added_later():
    parameters, matrices = make_parameters(9, 7), make_parameters((4, 6), (5, 5))
    plain, plain_matrices = copies(parameters), copies(matrices)
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1, momentum=0.9)
    sgd = torch.optim.SGD(plain, lr=0.1, momentum=0.9)
    muon = Muon(plain_matrices, lr=0.02)
    for number in range(4):
        if number == 2:
            zero.add_param_group({"params": matrices, "optimizer_class": Muon, "lr": 0.02})
            assert "dampening" not in zero.param_groups[1]
        used = 2 if number < 2 else 4
        set_gradients([*parameters, *matrices][:used], number)
        set_gradients([*plain, *plain_matrices][:used], number)
        zero.step()
        sgd.step()
        muon.step()
        assert_bitwise([*parameters, *matrices], [*plain, *plain_matrices])


@on_ranks(2)
def test_masters_of_both_kinds():
    both = TwoPlain(stage=2, sharding="element", master_dtype=torch.float32)
    both.step(0)
    narrow = [nn.Parameter(p.detach().bfloat16()) for p in make_parameters(*MATRICES, *OTHERS)]
    masters = [nn.Parameter(p.detach().float()) for p in narrow]
    zero = ZeroRedundancyOptimizer(
        [{"params": narrow[:3], "optimizer_class": Muon, "lr": 0.02}, {"params": narrow[3:]}],
        torch.optim.AdamW,
        lr=0.01,
        sharding="element",
        master_dtype=torch.float32,
    )
    plain = [Muon(masters[:3], lr=0.02), torch.optim.AdamW(masters[3:], lr=0.01)]
    for number in range(3):
        set_gradients(narrow, number)
        for parameter, master in zip(narrow, masters, strict=True):
            master.grad = parameter.grad.float()
        zero.step()
        for optimizer in plain:
            optimizer.step()
        assert_bitwise(narrow, [m.detach().bfloat16() for m in masters])


@on_ranks(2)
def test_errors_are_the_same_on_every_rank():
    vector = {"params": make_parameters(9), "optimizer_class": Muon}
    with pytest.raises(Exception, match="2D"):  # only one rank owns it
        ZeroRedundancyOptimizer([{"params": make_parameters(40)}, vector], torch.optim.SGD, lr=0.1)
    by_element = {"params": make_parameters((4, 4)), "optimizer_class": Muon, "sharding": "element"}
    with pytest.raises(ValueError, match="known to be element-wise"):
        ZeroRedundancyOptimizer([by_element], torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="cost of parameter 0 to be a finite number"):
        ZeroRedundancyOptimizer(make_parameters(4), torch.optim.SGD, lr=0.1, cost=lambda p: -1.0)


# -- cost ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_cost_decides_who_owns_what():
    shapes = [(8,), (4,), (2,), (2,)]
    by_elements = ZeroRedundancyOptimizer(make_parameters(*shapes), torch.optim.SGD, lr=0.1)
    assert [by_elements._param_to_rank[p] for p in by_elements._all_params] == [0, 1, 1, 1]
    costs = {8: 1.0, 4: 6.0, 2: 3.0}
    by_cost = ZeroRedundancyOptimizer(
        make_parameters(*shapes), torch.optim.SGD, lr=0.1, cost=lambda p: costs[p.numel()]
    )
    assert [by_cost._param_to_rank[p] for p in by_cost._all_params] == [0, 0, 1, 1]


@on_ranks(4)
def test_muons_operations_are_divided_evenly():
    """GPT-2's hidden matrices, a sixteenth as wide."""
    width, layers = 48, 12
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers
    zero = ZeroRedundancyOptimizer(make_parameters(*shapes), Muon, lr=0.02)

    def flops(rows, columns):
        less, more = sorted((rows, columns))
        return 4 * less * less * more + 2 * less**3

    own = [0.0] * 4
    for parameter, rank in zero._param_to_rank.items():
        own[rank] += flops(*parameter.shape)
    even = sum(own) / 4
    assert all(abs(one - even) < 0.1 * even for one in own), own


# -- muon_groups -----------------------------------------------------------------------------------


class TinyGPT(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.positions = nn.Embedding(5, 8)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.Linear(8, 24)
        self.project = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


@pytest.mark.parametrize("tied", [False, True])
def test_muon_groups_take_the_hidden_matrices(tied):
    model = TinyGPT(tied)
    hidden, rest = muon_groups(model, lr=0.02)
    assert hidden["optimizer_class"] is Muon and hidden["lr"] == 0.02
    assert {id(p) for p in hidden["params"]} == {
        id(model.attention.weight),
        id(model.project.weight),
    }
    together = [*hidden["params"], *rest["params"]]
    assert len(together) == len(set(together)) == len(list(model.parameters()))
    hidden, _ = muon_groups(model, head=["project.weight"])
    assert model.head.weight in set(hidden["params"]) or tied
    with pytest.raises(ValueError, match="names of the module's parameters"):
        muon_groups(model, head=["nothing.weight"])
