"""Float32 masters of bfloat16 and float16 parameters, against the plain optimizer over a float32
copy that is fed with the float32 sum of the ranks' gradients, its result rounded: the same bits."""

import warnings

import device as devices
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import assert_bitwise, assert_same, everywhere, on_ranks
from shardstep import ZeroRedundancyOptimizer
from shardstep.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

MASTERS = {"master_dtype": torch.float32}
both_shardings = pytest.mark.parametrize("sharding", ["parameter", "element"])


def narrow_parameters(dtype=torch.bfloat16, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(20, 5), (20,), (7, 11), (33,), (1,)]
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def loss_of(parameters, rank, number):
    """Element-wise, so that a gradient has the same bits wherever it is computed."""
    generator = torch.Generator().manual_seed(1 + 100 * number + rank)
    factors = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in parameters]
    used = [i for i in range(len(parameters)) if i != 3 or rank == 0]
    return sum((parameters[i] * factors[i]).float().square().sum() for i in used)


class ByHand:
    """Narrow parameters, their float32 copies, and the plain optimizer over these."""

    def __init__(self, optimizer_class, dtype=torch.bfloat16, **defaults):
        self.parameters = narrow_parameters(dtype)
        self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.plain = optimizer_class(self.masters, **defaults)

    def sum_gradients(self, number, scale=1.0):
        """Leaves the float32 average over the ranks, of gradients as narrow as they travel."""
        world_size = dist.get_world_size()
        for master in self.masters:
            master.grad = None
        for rank in range(world_size):
            loss = loss_of(self.parameters, rank, number) * scale
            gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
            for master, gradient in zip(self.masters, gradients, strict=True):
                if gradient is None:
                    continue
                term = gradient.float()
                master.grad = term if master.grad is None else master.grad + term
        for master in self.masters:
            master.grad.div_(world_size)

    def step(self):
        self.plain.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)


def stage2(parameters, optimizer_class, **options):
    return ZeroRedundancyOptimizer(parameters, optimizer_class, stage=2, **MASTERS, **options)


@both_shardings
@pytest.mark.parametrize("exchange", ["pairwise", "shared_memory", "native", "hierarchical"])
@pytest.mark.parametrize(
    "optimizer_class, options",
    [(torch.optim.AdamW, {"fused": True}), (torch.optim.NAdam, {}), (torch.optim.Rprop, {})],
)
@pytest.mark.part(6)
@on_ranks(2)
def test_stage_2_equals_masters_by_hand(sharding, exchange, optimizer_class, options):
    options = {"lr": 1e-2, **options}
    parameters = narrow_parameters()
    zero = stage2(parameters, optimizer_class, sharding=sharding, exchange=exchange, **options)
    by_hand = ByHand(optimizer_class, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(zero, 2, 0.5)
    plain_scheduler = torch.optim.lr_scheduler.StepLR(by_hand.plain, 2, 0.5)
    for number in range(5):
        loss_of(parameters, dist.get_rank(), number).backward()
        zero.step()
        zero.zero_grad()
        scheduler.step()
        by_hand.sum_gradients(number)
        by_hand.step()
        plain_scheduler.step()
        assert_bitwise(parameters, by_hand.parameters)


@both_shardings
@on_ranks(2)
def test_torchs_clipping_and_scaler_work_on_the_float32_sums(sharding):
    parameters = narrow_parameters(torch.float16)
    zero = stage2(parameters, torch.optim.SGD, sharding=sharding, lr=1e-2)
    by_hand = ByHand(torch.optim.SGD, torch.float16, lr=1e-2)
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    for number in range(3):
        scaler.scale(loss_of(parameters, dist.get_rank(), number)).backward()
        scaler.unscale_(zero)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        scaler.step(zero)
        scaler.update()
        zero.zero_grad()
        by_hand.sum_gradients(number, scale=8.0)
        for master in by_hand.masters:
            master.grad.div_(8.0)
        expected = torch.nn.utils.clip_grad_norm_(by_hand.masters, 0.5)
        assert norm.dtype == torch.float32
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        by_hand.step()
        for left, right in zip(parameters, by_hand.parameters, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-5)


@on_ranks(2)
def test_groups_added_later_and_wide_parameters_beside_narrow_ones():
    """Of the wide ones, gradients travel in gradient_dtype; narrow ones travel as they are."""
    options = {"lr": 1e-2, "sharding": "element", "gradient_dtype": torch.float16}
    parameters = narrow_parameters()
    zero = stage2(parameters[:3], torch.optim.AdamW, **options)
    wide = [nn.Parameter(p.detach().float()) for p in narrow_parameters(seed=5)]
    zero.add_param_group({"params": parameters[3:]})
    zero.add_param_group({"params": wide})
    by_hand = ByHand(torch.optim.AdamW, lr=1e-2)
    plain_wide = [nn.Parameter(p.detach().clone()) for p in wide]
    plain = torch.optim.AdamW(plain_wide, lr=1e-2)
    for number in range(3):
        loss = loss_of(parameters, dist.get_rank(), number)
        (loss + loss_of(wide, dist.get_rank(), 50 + number)).backward()
        zero.step()
        zero.zero_grad()
        by_hand.sum_gradients(number)
        by_hand.step()
        assert_bitwise(parameters, by_hand.parameters)
        sums = [torch.zeros_like(p) for p in plain_wide]
        for rank in range(2):
            loss = loss_of(plain_wide, rank, 50 + number)
            terms = torch.autograd.grad(loss, plain_wide, allow_unused=True)
            for total, term in zip(sums, terms, strict=True):
                total.add_(0 if term is None else term.half().float())
        for parameter, total in zip(plain_wide, sums, strict=True):
            parameter.grad = total.div_(2)
        plain.step()
        assert_bitwise(wide, plain_wide)


def net_of(dtype):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)


def batch(rank, number):
    generator = torch.Generator().manual_seed(31 * number + rank)
    return torch.randn(5, 6, generator=generator).to(torch.bfloat16)


class RoundedStep:
    """A plain optimizer over float32 copies of a DDP model's parameters."""

    def __init__(self, net):
        self.parameters = list(net.parameters())
        self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.plain = torch.optim.AdamW(self.masters, lr=1e-2)

    def step(self):
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        self.plain.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)


@both_shardings
@pytest.mark.parametrize("hook", [None, hook_with_zero_step, hook_with_zero_step_interleaved])
@on_ranks(2)
def test_stage_1_under_ddp_equals_masters_by_hand(sharding, hook):
    net, plain_net = net_of(torch.bfloat16), net_of(torch.bfloat16)
    ddp, plain_ddp = (DistributedDataParallel(n, bucket_cap_mb=1e-4) for n in (net, plain_net))
    zero = ZeroRedundancyOptimizer(
        net.parameters(),
        torch.optim.AdamW,
        lr=1e-2,
        sharding=sharding,
        overlap_with_ddp=hook is not None,
        **MASTERS,
    )
    if hook is not None:
        ddp.register_comm_hook(None, hook(allreduce_hook, ddp, zero))
        plain_ddp.register_comm_hook(None, allreduce_hook)
    by_hand = RoundedStep(plain_net)
    for number in range(4):
        for model in (ddp, plain_ddp):
            model(batch(dist.get_rank(), number)).float().square().sum().backward()
        if hook is None:
            zero.step()
        zero.zero_grad()
        by_hand.step()
        assert_bitwise(net.parameters(), plain_net.parameters())


@both_shardings
@on_ranks(2)
def test_uneven_inputs(sharding):
    net, plain_net = net_of(torch.bfloat16), net_of(torch.bfloat16)
    ddp, plain_ddp = DistributedDataParallel(net), DistributedDataParallel(plain_net)
    zero = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.AdamW, lr=1e-2, sharding=sharding, **MASTERS
    )
    by_hand = RoundedStep(plain_net)
    rank = dist.get_rank()
    with Join([ddp, zero]):
        for number in range(2 + rank):
            ddp(batch(rank, number)).float().square().sum().backward()
            zero.step()
            zero.zero_grad()
    with Join([plain_ddp]):
        for number in range(2 + rank):
            plain_ddp(batch(rank, number)).float().square().sum().backward()
            by_hand.step()
    for parameter, plain in zip(net.parameters(), plain_net.parameters(), strict=True):
        expected = plain.detach().clone()
        dist.broadcast(expected, 1)  # only this rank had all inputs
        assert torch.equal(parameter, expected)


@pytest.mark.parametrize("options", [{"overlap_forward": True}, {"share_parameters": True}])
@on_ranks(2)
def test_overlap_forward_and_shared_parameters(options):
    net = net_of(torch.bfloat16)
    plain_net = net_of(torch.bfloat16)
    zero = stage2(
        net.parameters(), torch.optim.AdamW, lr=1e-2, sharding="element", module=net, **options
    )
    by_hand = RoundedStep(plain_net)
    for number in range(4):
        net(batch(0, number)).float().square().sum().backward()  # the same on both ranks
        zero.step()
        zero.zero_grad()
        plain_net(batch(0, number)).float().square().sum().backward()
        by_hand.step()
    assert_bitwise(net.parameters(), plain_net.parameters())


@on_ranks(2)
def test_loading_a_models_weights_later_reaches_the_masters():
    net, other = net_of(torch.bfloat16), net_of(torch.bfloat16)
    zero = stage2(net.parameters(), torch.optim.SGD, lr=1e-4, sharding="element", module=net)

    def step():
        net(batch(0, 1)).float().square().sum().backward()
        zero.step()
        zero.zero_grad()

    step()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    net.load_state_dict(other.state_dict())
    step()  # moves them by less than half
    for parameter, loaded in zip(net.parameters(), other.parameters(), strict=True):
        assert (parameter - loaded).abs().max() < 0.5


@pytest.mark.parametrize("exchange", ["pairwise", "shared_memory", "native", "hierarchical"])
@on_ranks(2)
def test_changes_through_data_are_not_seen_whatever_the_exchange(exchange):
    """So no step compares parameters with their masters: what arrives does not count."""
    parameters = narrow_parameters()
    zero = ZeroRedundancyOptimizer(
        parameters, torch.optim.SGD, lr=0.0, sharding="element", exchange=exchange, **MASTERS
    )
    expected = [p.detach().clone() for p in parameters]
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        zero.step()
        assert_bitwise(parameters, expected)
        for parameter in parameters:
            parameter.data.add_(1.0)


# -- state -----------------------------------------------------------------------------------------


def trained(sharding, stage, steps, parameters=None, load=None, first=0, group=None):
    parameters = narrow_parameters() if parameters is None else parameters
    zero = ZeroRedundancyOptimizer(
        parameters, torch.optim.AdamW, group, lr=1e-2, sharding=sharding, stage=stage, **MASTERS
    )
    if load is not None:
        load(zero)
    for number in range(first, first + steps):
        loss_of(parameters, 0, number).backward()  # the same on every rank
        zero.step()
        zero.zero_grad()
    return zero


@both_shardings
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("way", ["state_dict", "checkpoint", "sharded"])
@pytest.mark.part(5)
@on_ranks(2)
def test_state_carries_masters_into_the_other_sharding_and_stage(sharding, stage, way, tmp_path):
    zero = trained(sharding, stage, 3)
    parameters = [p.detach().clone() for p in zero._all_params]
    if way == "state_dict":
        state = everywhere(zero)
        assert state["state"][0]["master_param"].dtype == torch.float32

        def load(zero):
            zero.load_state_dict(state)

    elif way == "checkpoint":
        folder = [str(tmp_path / "checkpoint")]
        dist.broadcast_object_list(folder)
        zero.save_checkpoint(folder[0])

        def load(zero):
            zero.load_checkpoint(folder[0])

    else:
        folder = [str(tmp_path / "dcp")]
        dist.broadcast_object_list(folder)
        dcp.save({"optim": zero.sharded_state_dict()}, checkpoint_id=folder[0])

        def load(zero):
            wanted = {"optim": zero.sharded_state_dict()}
            dcp.load(wanted, checkpoint_id=folder[0], process_group=zero.process_group)
            zero.load_sharded_state_dict(wanted["optim"])

    other = {"parameter": "element", "element": "parameter"}[sharding]
    copies = [nn.Parameter(p.clone()) for p in parameters]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = trained(other, 3 - stage, 2, copies, load, first=3)
    expected = trained(sharding, stage, 5)
    assert_bitwise(again._all_params, expected._all_params)
    assert_same(everywhere(again)["state"], everywhere(expected)["state"])
    # And at another world size.
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    copies = [nn.Parameter(p.clone()) for p in parameters]
    small = trained(other, 3 - stage, 2, copies, load, first=3, group=alone)
    assert_bitwise(small._all_params, expected._all_params)
    assert_same(everywhere(small)["state"], everywhere(expected)["state"])


@both_shardings
@on_ranks(2)
def test_a_plain_optimizer_takes_the_state_and_gives_one_without_masters(sharding):
    zero = trained(sharding, 2, 3)
    state = everywhere(zero)
    # Goes on in float32 without masters, sharded or plain: parameters take the masters' bits.
    wide = [nn.Parameter(p.detach().float()) for p in zero._all_params]
    float32 = ZeroRedundancyOptimizer(wide, torch.optim.AdamW, lr=1e-2, sharding=sharding)
    float32.load_state_dict(state)
    masters = [state["state"][i]["master_param"] for i in range(len(wide))]
    assert_bitwise(wide, masters)
    plain_wide = [nn.Parameter(master.clone().to(devices.current())) for master in masters]
    plain = torch.optim.AdamW(plain_wide, lr=1e-2)
    plain.load_state_dict(state)
    for left, right in zip(wide, plain_wide, strict=True):
        left.grad, right.grad = torch.ones_like(left), torch.ones_like(right)
    float32.step()
    plain.step()
    assert_bitwise(wide, plain_wide)
    # And back: a state without masters says that they start from the parameters.
    parameters = [nn.Parameter(p.detach().bfloat16()) for p in plain_wide]
    again = ZeroRedundancyOptimizer(
        parameters, torch.optim.AdamW, lr=1e-2, sharding=sharding, **MASTERS
    )
    without = everywhere(float32)
    with pytest.warns(UserWarning, match="has no float32 masters") as caught:
        again.load_state_dict(without)
    assert sum("masters" in str(w.message) for w in caught) == 1
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    again.step()
    masters = [nn.Parameter(p.detach().bfloat16().float()) for p in plain_wide]
    by_hand = torch.optim.AdamW(masters, lr=1e-2)
    by_hand.load_state_dict(without)
    for master in masters:
        master.grad = torch.ones_like(master)
    by_hand.step()
    assert_bitwise(parameters, [m.detach().bfloat16() for m in masters])


@on_ranks(2)
def test_a_master_of_another_shape_and_another_dtype_are_refused():
    zero = trained("element", 1, 1)
    state = everywhere(zero)
    state["state"][0]["master_param"] = torch.zeros(3)
    with pytest.raises(ValueError, match="expected master_param of parameter 0 with shape"):
        zero.load_state_dict(state)
    with pytest.raises(ValueError, match="expected master_dtype to be float32, got Half"):
        ZeroRedundancyOptimizer(
            narrow_parameters(), torch.optim.SGD, lr=0.1, master_dtype=torch.float16
        )
