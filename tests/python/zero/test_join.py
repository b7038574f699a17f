"""Uneven inputs: ranks that have run out shadow the steps of the others."""

import copy

import device as devices
import pytest
import torch
import torch.distributed as dist
from helpers import (
    assert_bitwise,
    assert_same_on_all_ranks,
    backward,
    batches,
    copies,
    ddp_net,
    every_sharding,
    gathered,
    heard,
    make_net,
    make_parameters,
    on_ranks,
    ours,
    set_gradients,
    train,
)
from implementation import (
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    zero_module,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join, Joinable, JoinHook


class GivesGradients(Joinable):
    """Announces each step; a rank without inputs gets the step's gradients too."""

    def __init__(self, parameters):
        super().__init__()
        self.parameters = parameters
        self.steps = 0
        self.ended = None

    def __call__(self):
        Join.notify_join_context(self)
        set_gradients(self.parameters, self.steps)
        self.steps += 1
        dist.all_reduce(torch.ones(1))

    def join_hook(self, **kwargs):
        return _GivesGradientsHook(self)

    @property
    def join_device(self):
        return devices.current()

    @property
    def join_process_group(self):
        return dist.group.WORLD


class _GivesGradientsHook(JoinHook):
    def __init__(self, owner):
        self.owner = owner

    def main_hook(self):
        set_gradients(self.owner.parameters, self.owner.steps)
        self.owner.steps += 1
        dist.all_reduce(torch.zeros(1))

    def post_hook(self, is_last_joiner):
        self.owner.ended = is_last_joiner


def inputs_of(rank):
    return 2 + 2 * rank


@every_sharding
@on_ranks(2, 4, timeout=20)
def test_joined_ranks_shadow_the_step(options):
    parameters = make_parameters(9, (3, 5), 7, (2, 2))
    others = copies(parameters)
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.1, **options)
    plain = torch.optim.Adam(others, lr=0.1)
    gives = GivesGradients(parameters)
    with Join([gives, zero]):
        for _ in range(inputs_of(dist.get_rank())):
            gives()
            zero.step()
    most = inputs_of(dist.get_world_size() - 1)
    assert gives.steps == most
    for number in range(most):
        set_gradients(others, number)
        plain.step()
    assert_bitwise(parameters, others)
    last = dist.get_rank() == dist.get_world_size() - 1
    assert gives.ended is last


@ours
@every_sharding
@pytest.mark.parametrize("has_at_first", [True, False])
@on_ranks(2, 3, timeout=20)
def test_joined_ranks_follow_the_gradient_of_a_frozen_parameter(options, has_at_first):
    """Rank 0 has run out when it goes, or comes. A frozen parameter is updated while it has one."""
    parameters = make_parameters(9, (3, 50), 7)
    parameters[1].requires_grad_(False)
    others = copies(parameters)
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1, **options)
    plain = torch.optim.SGD(others, lr=0.1)

    def give_gradients(params, number):
        set_gradients(params, number)
        if (number < 2) != has_at_first:
            params[1].grad = None

    with Join([zero]):
        for number in range(inputs_of(dist.get_rank())):
            give_gradients(parameters, number)
            zero.step()
    for number in range(inputs_of(dist.get_world_size() - 1)):
        give_gradients(others, number)
        plain.step()
    assert_bitwise(parameters, others)


@ours
@on_ranks(2, 4, timeout=20)
def test_alone_it_announces_its_own_steps():
    """The only Joinable: gradients stay as the user left them. torch's hangs."""
    parameters = make_parameters(9, 7)
    others = copies(parameters)
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    plain = torch.optim.SGD(others, lr=0.1)
    set_gradients(parameters, 0)
    set_gradients(others, 0)
    with Join([zero]):
        for _ in range(inputs_of(dist.get_rank())):
            zero.step()
    for _ in range(inputs_of(dist.get_world_size() - 1)):
        plain.step()
    assert_bitwise(parameters, others)
    # Outside of the scope it announces nothing.
    zero.step()
    plain.step()
    assert_bitwise(parameters, others)


@on_ranks(2)
def test_even_inputs_and_disabled():
    for enable in (True, False):
        parameters = make_parameters(9, 7)
        others = copies(parameters)
        zero = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
        plain = torch.optim.SGD(others, lr=0.1)
        with Join([zero], enable=enable):
            for number in range(3):
                set_gradients(parameters, number)
                set_gradients(others, number)
                zero.step()
                plain.step()
        assert_bitwise(parameters, others)


@every_sharding
@on_ranks(2, 4, timeout=20)
def test_early_termination_raises_on_every_rank(options):
    parameters = make_parameters(9, 7)
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1, **options)
    gives = GivesGradients(parameters)
    with pytest.raises(RuntimeError, match="exhausted"):  # noqa: SIM117
        with Join([gives, zero], throw_on_early_termination=True):
            for _ in range(inputs_of(dist.get_rank())):
                gives()
                zero.step()
    assert gives.steps == inputs_of(0)
    assert_same_on_all_ranks(parameters)


class Counts(Joinable):
    """Another Joinable: counts the active ranks of each round."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __call__(self, active=1.0):
        if active:
            Join.notify_join_context(self)
        count = torch.tensor([active])
        dist.all_reduce(count)
        self.seen.append(int(count))

    def join_hook(self, **kwargs):
        counts = self

        class Hook(JoinHook):
            def main_hook(self):
                counts(active=0.0)

        return Hook()

    @property
    def join_device(self):
        return devices.current()

    @property
    def join_process_group(self):
        return dist.group.WORLD


@ours
@every_sharding
@on_ranks(2, 4, timeout=20)
def test_first_in_the_list(options):
    """Announcing a step is its business then. torch's hangs."""
    parameters = make_parameters(9, (3, 5), 7, (2, 2))
    others = copies(parameters)
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.1, **options)
    plain = torch.optim.Adam(others, lr=0.1)
    counts = Counts()
    set_gradients(parameters, 0)
    set_gradients(others, 0)
    with Join([zero, counts]):
        for _ in range(inputs_of(dist.get_rank())):
            zero.step()
            counts()
    most = inputs_of(dist.get_world_size() - 1)
    assert len(counts.seen) == most
    for _ in range(most):
        plain.step()
    assert_bitwise(parameters, others)


@pytest.mark.parametrize("place", [0, 1, 2])
@every_sharding
@on_ranks(2, 4, timeout=20)
def test_beside_another_joinable_in_any_order(place, options):
    """In the list and in the round it stands before, between or behind the others."""
    parameters = make_parameters(9, (3, 5), 7, (2, 2))
    others = copies(parameters)
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.1, **options)
    plain = torch.optim.Adam(others, lr=0.1)
    gives, counts = GivesGradients(parameters), Counts()
    joinables = [gives, zero]
    joinables.insert(place, counts)
    calls = [zero.step if j is zero else j for j in joinables]
    with Join(joinables):
        for _ in range(inputs_of(dist.get_rank())):
            for call in calls:
                call()
    world_size = dist.get_world_size()
    most = inputs_of(world_size - 1)
    assert counts.seen == [
        sum(inputs_of(rank) > number for rank in range(world_size)) for number in range(most)
    ]
    for number in range(most):
        set_gradients(others, number)
        plain.step()
    assert_bitwise(parameters, others)


@on_ranks(2)
def test_hook():
    parameters = make_parameters(9, 7)
    others = copies(parameters)
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    plain = torch.optim.SGD(others, lr=0.1)
    hook = zero.join_hook(anything="is ignored")
    assert isinstance(hook, JoinHook)
    assert isinstance(hook, zero_module._ZeROJoinHook)
    assert hook.zero is zero
    set_gradients(parameters, 0)
    set_gradients(others, 0)
    hook.main_hook()  # one step
    plain.step()
    assert_bitwise(parameters, others)
    hook.post_hook(True)
    assert_bitwise(parameters, others)
    with pytest.raises((AssertionError, TypeError)):
        zero_module._ZeROJoinHook(plain)


def uneven(rank):
    return 3 + 2 * rank


def ddp_uneven(optimizer_of, inputs, join_zero):
    """Trains under Join, then gives the parameters that DDP leaves on all ranks."""
    ddp = ddp_net()
    optimizer = optimizer_of(ddp.parameters())
    with Join([ddp, optimizer] if join_zero else [ddp]):
        for batch in inputs:
            train(ddp, optimizer, batch)
    return list(ddp.parameters())


@ours
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
@every_sharding
@on_ranks(2, 4, timeout=20)
def test_with_ddp_it_equals_a_local_optimizer(optimizer_class, options):
    """Joined ranks have no gradients of their own; still their shard is updated rightly."""
    inputs = batches(uneven(dist.get_rank()))
    sharded = ddp_uneven(
        lambda parameters: ZeroRedundancyOptimizer(parameters, optimizer_class, lr=0.05, **options),
        inputs,
        join_zero=True,
    )
    local = ddp_uneven(
        lambda parameters: optimizer_class(parameters, lr=0.05), inputs, join_zero=False
    )
    assert_same_on_all_ranks(sharded)
    assert_bitwise(sharded, local)


@ours
@pytest.mark.parametrize("interleaved", [False, True])
@every_sharding
@on_ranks(2, 4, timeout=20)
def test_with_ddp_and_overlap(interleaved, options):
    inputs = batches(uneven(dist.get_rank()))
    ddp = ddp_net()
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.05, **options
    )
    make_hook = hook_with_zero_step_interleaved if interleaved else hook_with_zero_step
    ddp.register_comm_hook(None, make_hook(allreduce_hook, ddp, zero))
    with Join([ddp, zero]):
        for batch in inputs:
            ddp.zero_grad()
            backward(ddp, batch)
    # A hook divides by the world size, as DDP does where inputs are uneven.
    local = ddp_uneven(lambda p: torch.optim.Adam(p, lr=0.05), inputs, join_zero=False)
    assert_same_on_all_ranks(ddp.parameters())
    assert_bitwise(ddp.parameters(), local)


@on_ranks(2, 4, timeout=20)
def test_with_ddp_early_termination():
    ddp = ddp_net()
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.05)
    steps = 0
    with pytest.raises(RuntimeError, match="exhausted"):  # noqa: SIM117
        with Join([ddp, zero], throw_on_early_termination=True):
            for batch in batches(uneven(dist.get_rank())):
                train(ddp, zero, batch)
                steps += 1
    assert gathered(steps) == [uneven(0)] * dist.get_world_size()
    assert_same_on_all_ranks(ddp.parameters())


@on_ranks(2)
def test_groups_that_differ_are_refused():
    zero = ZeroRedundancyOptimizer(make_parameters(3), torch.optim.SGD, lr=0.1)
    other = ZeroRedundancyOptimizer(
        make_parameters(3), torch.optim.SGD, dist.new_group([0, 1]), lr=0.1
    )
    with pytest.raises(ValueError, match="process group"):
        Join([zero, other])


@ours
@on_ranks(2, timeout=20)
def test_no_warning_in_a_few_rounds():
    zero = ZeroRedundancyOptimizer(make_parameters(3), torch.optim.SGD, lr=0.1)
    with heard() as texts, Join([zero]):
        for _ in range(3 * (dist.get_rank() + 1)):
            zero.step()
    assert texts == []


def clip_by_torch(net, optimizer):
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)


def clip_by_ours(net, optimizer):
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.clip_grad_norm_(0.05)
    else:
        clip_by_torch(net, optimizer)


def clip_twice_and_look(net, optimizer):
    torch.nn.utils.clip_grad_value_(net.parameters(), 0.02)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
    for parameter in net.parameters():
        parameter.grad.mul_(0.5)
    assert torch.nn.utils.clip_grad_norm_(net.parameters(), 10) < 0.026


@ours
@pytest.mark.parametrize("clip", [clip_by_torch, clip_by_ours, clip_twice_and_look])
@pytest.mark.parametrize("sharding", ["parameter", "element"])
@on_ranks(2)
def test_joined_ranks_of_stage_2_change_gradients_as_the_others_do(sharding, clip):
    """The first rank runs out of inputs first, then the second, as under DDP."""
    plain = ddp_net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    net = copy.deepcopy(plain.module)
    zero = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, stage=2, sharding=sharding, lr=0.1
    )
    for seed, counts in enumerate([(2, 4), (3, 1)]):
        inputs = batches(counts[dist.get_rank()], seed)
        for model, optim, joinable in ((plain, optimizer, plain), (net, zero, zero)):
            with Join([joinable]):
                for batch in inputs:
                    optim.zero_grad()
                    backward(model, batch)
                    clip(model, optim)
                    optim.step()
        # Norms are summed in another order.
        pairs = zip(net.parameters(), plain.parameters(), strict=True)
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@ours
@on_ranks(2, timeout=30)
def test_changes_that_a_joined_rank_cannot_make_are_an_error_on_all():
    net = make_net()
    zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, stage=2, lr=0.1)
    with (
        pytest.raises(RuntimeError, match="expected the same changes to the gradients"),
        Join([zero]),
    ):
        for batch in batches(1 + dist.get_rank()):
            zero.zero_grad()
            backward(net, batch)
            for parameter in net.parameters():
                parameter.grad.add_(parameter.detach())
            zero.step()


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used = torch.nn.Linear(4, 3)
        self.unused = torch.nn.Linear(4, 3)

    def losses(self, seed, both, ranks):
        """Of the given ranks, by a batch of its own each."""
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(dist.get_world_size(), 5, 4, generator=generator)
        for rank in ranks:
            batch = inputs[rank].to(self.used.weight.device)
            branches = [self.used, self.unused] if both else [self.used]
            yield sum(branch(batch).square().mean() for branch in branches)


def branches(sharding, **options):
    """A model and its plain optimizer, and the same with stage 2."""
    plain = Branches().to(devices.current())
    for parameter in plain.parameters():
        dist.broadcast(parameter.data, 0)
    net = copy.deepcopy(plain)
    options = {"lr": 0.1, **options}
    optimizer = torch.optim.SGD(plain.parameters(), **options)
    zero = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, stage=2, sharding=sharding, **options
    )
    return plain, optimizer, net, zero


def forget_by_the_optimizer(net, optimizer):
    optimizer.zero_grad()


def forget_by_zeros(net, optimizer):
    optimizer.zero_grad(set_to_none=False)


def forget_by_the_module(net, optimizer):
    net.zero_grad()


def forget_by_zeros_of_the_module(net, optimizer):
    net.zero_grad(set_to_none=False)


def forget_some(net, optimizer):
    net.unused.zero_grad()
    net.used.bias.grad = None


def forget_nothing(net, optimizer):
    pass


@ours
@pytest.mark.parametrize("exchange", ["pairwise", "shared_memory", "native"])
@pytest.mark.parametrize(
    "forget",
    [
        forget_by_the_optimizer,
        forget_by_zeros,
        forget_by_the_module,
        forget_by_zeros_of_the_module,
    ],
)
@pytest.mark.parametrize("sharding", ["parameter", "element"])
@on_ranks(2, 3, timeout=30)
def test_gradients_are_forgotten_after_the_last_step_of_a_join(sharding, forget, exchange):
    """Ranks that have joined do not run that line; the next Join begins as under DDP."""
    plain = ddp_net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    net = copy.deepcopy(plain.module)
    zero = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, stage=2, sharding=sharding, exchange=exchange, lr=0.1
    )
    rank = dist.get_rank()
    for seed, count in enumerate([2 + rank, 4 - rank, 0 if rank == 0 else 2, 2]):
        for model, optim, joinable in ((plain, optimizer, plain), (net, zero, zero)):
            with Join([joinable]):
                for batch in batches(count, seed):
                    backward(model, batch)
                    optim.step()
                    forget(model, optim)
        # Without clipping, only the order of sums differs.
        for found, expected in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def clip_zeros(parameter):
    torch.nn.utils.clip_grad_value_([parameter], 0.02)


def raise_zeros(parameter):
    parameter.grad.clamp_(min=0.125)


def leave_zeros(parameter):
    pass


@ours
@pytest.mark.parametrize("change", [clip_zeros, raise_zeros, leave_zeros])
@pytest.mark.parametrize(
    "forget",
    [
        forget_by_the_optimizer,
        forget_by_zeros,
        forget_by_the_module,
        forget_by_zeros_of_the_module,
        forget_some,
        forget_nothing,
    ],
)
@pytest.mark.parametrize("sharding", ["parameter", "element"])
@on_ranks(2, timeout=30)
def test_what_a_joined_rank_changed_after_zero_grad_follows_the_others(sharding, forget, change):
    """It has zeros that it changed, which ranks with inputs forget, keep or change again."""
    plain, optimizer, net, zero = branches(sharding, momentum=0.9, weight_decay=0.1)
    world = range(dist.get_world_size())
    for first_to_join in world:
        ranks = [rank for rank in world if rank != first_to_join]

        (sum(plain.losses(first_to_join, True, world)) / len(world)).backward()
        sum(net.losses(first_to_join, True, [dist.get_rank()])).backward()
        for optim, model in ((optimizer, plain), (zero, net)):
            optim.zero_grad(set_to_none=False)
            for parameter in model.parameters():
                change(parameter)

        for seed in (10, 11):
            forget(plain, optimizer)
            (sum(plain.losses(seed, False, ranks)) / len(world)).backward()
            clip_zeros(plain.used.bias)
            optimizer.step()
        with Join([zero]):
            for seed in (10, 11) if dist.get_rank() in ranks else ():
                forget(net, zero)
                sum(net.losses(seed, False, [dist.get_rank()])).backward()
                clip_zeros(net.used.bias)
                zero.step()
        optimizer.zero_grad()
        zero.zero_grad()
        for found, expected in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def look_at_none(net, zero):
    torch.nn.utils.clip_grad_norm_([p for g in zero.param_groups for p in g["params"]], 1.0)


def look_and_drop(net, zero):
    sum(net.losses(7, True, [dist.get_rank()])).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    net.zero_grad()


@ours
@pytest.mark.parametrize("before", [look_at_none, look_and_drop])
@pytest.mark.parametrize("sharding", ["parameter", "element"])
@on_ranks(2, timeout=30)
def test_gradients_that_were_looked_at_and_dropped_before_join_do_not_come_back(sharding, before):
    """The ranks have met since the last step; then one of them has no inputs."""
    plain, optimizer, net, zero = branches(sharding)
    before(net, zero)
    for seed in (0, 1):  # its gradients add up
        (sum(plain.losses(seed, True, [1])) / 2).backward()
        optimizer.step()
    with Join([zero]):
        for seed in (0, 1) if dist.get_rank() == 1 else ():
            sum(net.losses(seed, True, [1])).backward()
            zero.step()
    for found, expected in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@ours
@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("sharding", ["parameter", "element"])
@on_ranks(2, timeout=30)
def test_a_joined_rank_leaves_gradients_out_of_a_step_as_the_others_do(sharding, look):
    """They set some `.grad` to None before a step, with or without looking at it first."""
    *_, net, zero = branches(sharding, momentum=0.9, weight_decay=0.1)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with Join([zero]):
        for seed in range(2 * dist.get_rank()):
            zero.zero_grad()
            sum(net.losses(seed, True, [dist.get_rank()])).backward()
            if look:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            net.unused.zero_grad()
            zero.step()
    assert_same_on_all_ranks(list(net.parameters()))
    for old, (name, new) in zip(before, net.named_parameters(), strict=True):
        assert torch.equal(old, new) == name.startswith("unused")
