"""Stochastic rounding of bfloat16 parameters that have no masters: computed as the plain optimizer
computes in float32, then rounded up or down at random."""

import pytest
import torch
import torch.distributed as dist
from helpers import assert_bitwise, assert_same, assert_same_on_all_ranks, everywhere, on_ranks
from shardstep import ZeroRedundancyOptimizer
from shardstep.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

STOCHASTIC = {"rounding": "stochastic"}
both_shardings = pytest.mark.parametrize("sharding", ["parameter", "element"])
both_stages = pytest.mark.parametrize("stage", [1, 2])


def narrow_parameters(seed=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(20, 5), (20,), (7, 11), (33,), (1,)]
    return [nn.Parameter(torch.randn(s, generator=generator).bfloat16()) for s in shapes]


def loss_of(parameters, number):
    """The same on every rank; every fourth parameter is not used."""
    generator = torch.Generator().manual_seed(1 + number)
    factors = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in parameters]
    used = [i for i in range(len(parameters)) if (i + number) % 4 != 3]
    return sum((parameters[i] * factors[i]).float().square().sum() for i in used)


def assert_neighbours(parameters, wide):
    """Each element is one of the two bfloat16 neighbours of the float32 value, or the value."""
    for parameter, value in zip(parameters, wide, strict=True):
        bits = value.detach().contiguous().view(torch.int32)
        low = bits & -0x10000
        high = torch.where(bits == low, low, low + 0x10000)
        got = parameter.detach().float().contiguous().view(torch.int32)
        assert ((got == low) | (got == high)).all()


class ByHand:
    """The plain optimizer in float32, which starts each step from the given parameters."""

    def __init__(self, parameters, optimizer_class, **defaults):
        self.wide = [nn.Parameter(p.detach().float()) for p in parameters]
        self.plain = optimizer_class(self.wide, **defaults)

    def step_from(self, parameters, gradients):
        with torch.no_grad():
            for wide, parameter, gradient in zip(self.wide, parameters, gradients, strict=True):
                wide.copy_(parameter)
                wide.grad = None if gradient is None else gradient.float()
        self.plain.step()
        return self.wide


def trained(stage, sharding, steps=4, **options):
    """Parameters after some steps from a seed of torch's generator."""
    torch.manual_seed(11)
    parameters = narrow_parameters()
    zero = ZeroRedundancyOptimizer(
        parameters,
        torch.optim.AdamW,
        lr=1e-2,
        stage=stage,
        sharding=sharding,
        **STOCHASTIC,
        **options,
    )
    for number in range(steps):
        loss_of(parameters, number).backward()
        zero.step()
        zero.zero_grad()
    return parameters


@both_shardings
@both_stages
@pytest.mark.parametrize(
    "optimizer_class, options",
    [(torch.optim.AdamW, {"fused": True}), (torch.optim.Adagrad, {}), (torch.optim.Rprop, {})],
)
@pytest.mark.part(6)
@on_ranks(1, 2)
def test_what_is_rounded_is_the_float32_update(sharding, stage, optimizer_class, options):
    options = {"lr": 1e-2, **options}
    parameters = narrow_parameters()
    zero = ZeroRedundancyOptimizer(
        parameters, optimizer_class, stage=stage, sharding=sharding, **STOCHASTIC, **options
    )
    by_hand = ByHand(parameters, optimizer_class, **options)
    for number in range(4):
        before = [p.detach().clone().requires_grad_() for p in parameters]
        gradients = torch.autograd.grad(loss_of(before, number), before, allow_unused=True)
        wide = by_hand.step_from(before, gradients)
        loss_of(parameters, number).backward()
        zero.step()
        zero.zero_grad()
        assert_neighbours(parameters, wide)
        assert_same_on_all_ranks(parameters)
    for local in zero._local:
        assert local.tensor.dtype == torch.float32
        with pytest.raises(RuntimeError, match="have values during step"):
            local.tensor.sum()
    for values in everywhere(zero)["state"].values():
        assert "master_param" not in values
        assert all(v.dtype == torch.float32 for v in values.values() if torch.is_tensor(v))


@pytest.mark.cpu("it names exchanges for CPU tensors")
@on_ranks(1, 2, 3)
def test_one_seed_gives_the_same_bits_however_it_is_divided():
    expected = trained(1, "parameter")
    assert_same_on_all_ranks(expected)
    for exchange in ("pairwise", "shared_memory", "native", "hierarchical"):
        assert_bitwise(trained(1, "element", exchange=exchange), expected)
    if dist.get_world_size() == 3:
        return  # averages of three are rounded
    for sharding in ("parameter", "element"):
        for exchange in ("pairwise", "shared_memory", "native"):
            assert_bitwise(trained(2, sharding, exchange=exchange), expected)
    assert_bitwise(trained(2, "element", share_parameters=True), expected)
    assert_bitwise(trained(2, "element", parameters_as_bucket_view=True), expected)
    after = torch.rand(3)  # every rank has drawn as much as the others
    assert_same_on_all_ranks([after])


@both_shardings
@pytest.mark.parametrize("options", [{}, STOCHASTIC])
@on_ranks(2)
def test_small_updates_are_not_lost_on_average(sharding, options):
    # A step of 2e-4 below 1, where the neighbours of 1 are 2^-8 away.
    torch.manual_seed(dist.get_rank())
    parameters = [nn.Parameter(torch.ones(4000, dtype=torch.bfloat16)) for _ in range(2)]
    zero = ZeroRedundancyOptimizer(
        parameters, torch.optim.SGD, lr=2e-4, sharding=sharding, **options
    )
    for _ in range(100):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        zero.step()
    for parameter in parameters:
        mean = parameter.detach().double().mean().item()
        if options:
            assert mean == pytest.approx(0.98, abs=1e-3)
        else:
            assert mean == 1.0  # as torch.optim.SGD leaves it
    assert_same_on_all_ranks(parameters)


@both_shardings
@pytest.mark.parametrize("hook", [hook_with_zero_step, hook_with_zero_step_interleaved])
@on_ranks(2)
def test_inside_the_backward_pass_of_ddp(sharding, hook):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).bfloat16()
    ddp = DistributedDataParallel(net, bucket_cap_mb=1e-4)
    zero = ZeroRedundancyOptimizer(
        net.parameters(),
        torch.optim.AdamW,
        lr=1e-2,
        sharding=sharding,
        overlap_with_ddp=True,
        **STOCHASTIC,
    )
    ddp.register_comm_hook(None, hook(allreduce_hook, ddp, zero))
    by_hand = ByHand(list(net.parameters()), torch.optim.AdamW, lr=1e-2)
    inputs = torch.randn(5, 6).bfloat16()
    for _ in range(3):
        before = [p.detach().clone() for p in net.parameters()]
        loss = net(inputs).float().square().sum()
        gradients = torch.autograd.grad(loss, list(net.parameters()))  # the same on both ranks
        wide = by_hand.step_from(before, gradients)
        zero.zero_grad()
        ddp(inputs).float().square().sum().backward()
        assert_neighbours(net.parameters(), wide)
        assert_same_on_all_ranks(net.parameters())


@both_shardings
@both_stages
@on_ranks(2)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(sharding, stage, tmp_path):
    folder = [str(tmp_path / "checkpoint")]
    dist.broadcast_object_list(folder)

    def start():
        net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 4)).bfloat16()
        zero = ZeroRedundancyOptimizer(
            net.parameters(),
            torch.optim.AdamW,
            lr=1e-2,
            sharding=sharding,
            stage=stage,
            **STOCHASTIC,
        )
        return net, zero

    def train(net, zero):
        for number in range(3):
            inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(number))
            net(inputs.bfloat16()).float().square().sum().backward()
            if stage == 1:
                for parameter in net.parameters():
                    dist.all_reduce(parameter.grad)
            zero.step()
            zero.zero_grad()

    torch.manual_seed(5)
    net, zero = start()
    torch.manual_seed(5 + dist.get_rank())  # other dropout on each rank
    train(net, zero)
    zero.save_checkpoint(folder[0], module=net)
    train(net, zero)
    torch.manual_seed(77)
    again_net, again = start()
    again.load_checkpoint(folder[0], module=again_net)
    train(again_net, again)
    assert_bitwise(again_net.parameters(), net.parameters())
    assert_same(everywhere(again)["state"], everywhere(zero)["state"])


@on_ranks(2)
def test_state_goes_to_and_from_runs_without_it():
    """A bfloat16 state becomes float32; a run with masters starts them from the parameters."""
    parameters = narrow_parameters()
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, sharding="element", **STOCHASTIC)
    plain_parameters = narrow_parameters()
    plain = torch.optim.AdamW(plain_parameters)
    loss_of(plain_parameters, 0).backward()
    plain.step()
    zero.load_state_dict(plain.state_dict())
    loss_of(parameters, 1).backward()
    zero.step()
    state = everywhere(zero)
    assert state["state"][0]["exp_avg"].dtype == torch.float32
    masters = ZeroRedundancyOptimizer(
        narrow_parameters(), torch.optim.AdamW, master_dtype=torch.float32
    )
    with pytest.warns(UserWarning, match="has no float32 masters"):
        masters.load_state_dict(state)
    rounds = ZeroRedundancyOptimizer(narrow_parameters(), torch.optim.AdamW, **STOCHASTIC)
    loss_of(masters._all_params, 0).backward()
    masters.step()
    rounds.load_state_dict(everywhere(masters))
    assert_same(everywhere(rounds)["state"][0].keys(), state["state"][0].keys())


@on_ranks(2)
def test_what_cannot_be_rounded_is_refused_on_every_rank():
    def refused(match, dtype=torch.bfloat16, **options):
        with pytest.raises(ValueError, match=match):
            ZeroRedundancyOptimizer(
                [nn.Parameter(torch.ones(3, dtype=dtype))], torch.optim.SGD, lr=0.1, **options
            )

    refused("stochastic rounding, got parameter 0 of Half", torch.float16, **STOCHASTIC)
    refused("stochastic rounding, got only Float", torch.float32, **STOCHASTIC)
    refused("got both", master_dtype=torch.float32, **STOCHASTIC)
    refused("expected rounding to be one of 'nearest', 'stochastic'", rounding="up")
    mixed = [nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.bfloat16, torch.float32)]
    zero = ZeroRedundancyOptimizer(mixed, torch.optim.SGD, lr=0.3, sharding="element", **STOCHASTIC)
    with pytest.raises(ValueError, match="of Half"):
        zero.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float16))]})
    for parameter in mixed:
        parameter.grad = torch.ones_like(parameter)
    zero.step()
    assert torch.equal(mixed[1].detach(), torch.ones(3) - 0.3)
