"""step(): what it passes to the local optimizer, and what it returns."""

import contextlib
import threading
import time

import pytest
import torch
import torch.distributed as dist
from helpers import (
    Twins,
    assert_bitwise,
    assert_same_on_all_ranks,
    every_layout,
    every_sharding,
    gathered,
    heard,
    make_parameters,
    on_ranks,
    ours,
    said_elementwise,
    set_gradients,
)
from implementation import ZeroRedundancyOptimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

OPTIMIZERS = [
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.Adam, {"foreach": True}),
    (torch.optim.AdamW, {"maximize": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (torch.optim.Adadelta, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {}),
]


@every_layout
@on_ranks(1, 2, 3, 4)
def test_it_updates_as_the_plain_optimizer(options):
    twins = Twins(options=options)
    twins.step(5)
    assert_same_on_all_ranks(twins.sharded)


@every_sharding
@on_ranks(2)
def test_any_optimizer_of_torch(options):
    for optimizer_class, defaults in OPTIMIZERS:
        try:
            Twins(optimizer_class, options=options, **defaults).step(4)
        except AssertionError as error:
            raise AssertionError(f"{optimizer_class.__name__} {defaults}") from error


class Normalized(torch.optim.Optimizer):
    """Divides by the gradient's norm: it needs whole parameters."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"])


@on_ranks(2, 4)
def test_optimizer_of_the_users_own():
    Twins(Normalized).step(3)


class WithoutClosure(torch.optim.SGD):
    def step(self):
        return super().step()


@every_sharding
@on_ranks(2)
def test_optimizer_whose_step_takes_no_closure(options):
    Twins(WithoutClosure, options=said_elementwise(options)).step(3)


class WithKeyword(torch.optim.SGD):
    def step(self, closure=None, scale=None, seen=None):
        if seen is not None:
            seen.append(scale)
        for group in self.param_groups:
            for parameter in group["params"]:
                if scale is not None and parameter.grad is not None:
                    parameter.grad = parameter.grad * scale
        return super().step(closure)


@every_sharding
@on_ranks(2)
def test_extra_keywords_reach_the_local_optimizer(options):
    twins = Twins(WithKeyword, options=said_elementwise(options))
    twins.set_gradients(seed=2)
    seen = []
    twins.plain.step(scale=3.0)
    assert twins.zero.step(scale=3.0, seen=seen) is None
    assert seen == [3.0]
    twins.check()
    twins.set_gradients(seed=3)
    twins.plain.step()
    twins.zero.step(None, seen=seen)
    assert seen == [3.0, None]
    twins.check()
    with pytest.raises(TypeError, match="temperature"):
        twins.zero.step(temperature=1)


class WithNewKeys(torch.optim.SGD):
    """Adds a key when built and one with every step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for group in self.param_groups:
            group["born"] = True

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return loss


@every_sharding
@on_ranks(2, 4)
def test_keys_that_the_local_optimizer_adds_show_up(options):
    groups = [{"count": 1}, {"count": 3, "lr": 0.5}]
    twins = Twins(WithNewKeys, groups=groups, options=said_elementwise(options))
    assert [group["born"] for group in twins.zero.param_groups] == [True, True]
    twins.step(1)
    assert [group["steps"] for group in twins.zero.param_groups] == [1, 1]
    twins.step(1)
    assert [group["steps"] for group in twins.zero.param_groups] == [2, 2]
    # And vice versa: the local optimizer continues from what the user changes.
    twins.zero.param_groups[1]["steps"] = 10
    twins.zero.step()
    assert [group["steps"] for group in twins.zero.param_groups] == [3, 11]


@every_sharding
@on_ranks(2)
def test_options_are_read_anew_at_each_step(options):
    groups = [{"count": 2}, {"count": 2, "lr": 0.5}]
    twins = Twins(torch.optim.SGD, groups=groups, options=options, momentum=0.9)
    for lr, momentum in [(0.1, 0.9), (0.3, 0.9), (0.3, 0.5), (0.0, 0.0)]:
        for optimizer in (twins.zero, twins.plain):
            optimizer.param_groups[0].update(lr=lr, momentum=momentum)
            optimizer.param_groups[1]["weight_decay"] = lr
        twins.step(1)
        assert twins.zero.optim.param_groups[0]["lr"] == lr
        assert twins.zero.optim.param_groups[1]["weight_decay"] == lr


@every_sharding
@on_ranks(2)
def test_learning_rate_in_a_tensor(options):
    twins = Twins(options=options, lr=torch.tensor(0.1), foreach=False)
    twins.step(1)
    for optimizer in (twins.zero, twins.plain):
        optimizer.param_groups[0]["lr"].fill_(0.01)
    twins.step(2)


@every_sharding
@on_ranks(2, 4)
def test_loss_of_the_closure_comes_back(options):
    """The closure computes gradients itself, once a step, with gradients enabled."""
    twins = Twins(torch.optim.SGD, options=options, momentum=0.9)
    calls = []

    def closure_over(parameters, optimizer):
        def closure():
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = sum(p.square().sum() for p in parameters)
            loss.backward()
            return loss

        return closure

    for _ in range(3):
        expected = twins.plain.step(closure_over(twins.unsharded, twins.plain))
        calls.clear()
        loss = twins.zero.step(closure_over(twins.sharded, twins.zero))
        assert calls == [True]
        assert torch.equal(loss, expected)
        twins.check()
    loss = twins.zero.step(closure=closure_over(twins.sharded, twins.zero))
    assert loss.item() < expected.item()
    assert twins.zero.step(closure=lambda: 1.5) == 1.5


@on_ranks(2)
def test_step_without_closure_returns_nothing():
    twins = Twins(torch.optim.SGD)
    twins.set_gradients(0)
    assert twins.zero.step() is None
    assert twins.zero.step(None) is None


@every_layout
@on_ranks(2, 4)
def test_parameters_without_gradient_are_left_alone(options):
    twins = Twins(torch.optim.AdamW, options=options, weight_decay=0.5)
    missing = [{0}, {1, 2}, set(), {0, 1, 2, 3}, {3}]
    for number, without in enumerate(missing):
        before = [p.detach().clone() for p in twins.sharded]
        twins.set_gradients(number)
        for index in without:
            twins.sharded[index].grad = twins.unsharded[index].grad = None
        twins.plain.step()
        twins.zero.step()
        twins.check()
        for index, parameter in enumerate(twins.sharded):
            assert torch.equal(parameter, before[index]) == (index in without)
    # A counter counts the steps with a gradient only.
    state = {}
    for rank in range(twins.zero.world_size):
        twins.zero.consolidate_state_dict(to=rank)
        if twins.zero.rank == rank:
            state = twins.zero.state_dict()["state"]
    assert [s["step"].item() for s in state.values()] == [3, 3, 3, 3]


@every_sharding
@on_ranks(2)
def test_steps_before_any_gradient_do_nothing(options):
    twins = Twins(options=options)
    twins.zero.step()
    assert_bitwise(twins.sharded, make_parameters(9, (3, 5), 7, (2, 2)))
    assert not twins.zero.optim.state
    twins.step(2)


@on_ranks(2, 4)
def test_parameters_flow_from_their_owners():
    """A rank's change of another rank's parameter is lost in the step."""
    twins = Twins(torch.optim.SGD)
    twins.set_gradients(0)
    with torch.no_grad():
        for parameter in twins.sharded:
            if twins.zero._param_to_rank[parameter] != twins.zero.rank:
                parameter.add_(1.0)
    twins.plain.step()
    twins.zero.step()
    twins.check()


@every_sharding
@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_zero_grad(set_to_none, options):
    twins = Twins(options=options)
    twins.set_gradients(0)
    twins.sharded[2].grad = None
    twins.zero.zero_grad(set_to_none=set_to_none)
    for index, parameter in enumerate(twins.sharded):
        if set_to_none or index == 2:
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, torch.zeros_like(parameter))
    twins.set_gradients(0)
    twins.zero.zero_grad()
    assert all(p.grad is None for p in twins.sharded)


@every_layout
@on_ranks(2)
def test_zeroed_gradients_in_place_then_another_step(options):
    twins = Twins(options=options)
    for number in range(3):
        twins.step(1, seed=number)
        for optimizer in (twins.zero, twins.plain):
            optimizer.zero_grad(set_to_none=False)
        twins.plain.step()
        twins.zero.step()
        twins.check()


@every_sharding
@on_ranks(2)
def test_gradients_that_are_views(options):
    """As DDP's gradient_as_bucket_view makes them, one buffer for all; refilled in place."""
    twins = Twins(options=options)
    for parameters in (twins.sharded, twins.unsharded):
        buffer = torch.zeros(sum(p.numel() for p in parameters))
        offset = 0
        for parameter in parameters:
            parameter.grad = buffer[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
    for number in range(3):
        for parameters in (twins.sharded, twins.unsharded):
            for index, parameter in enumerate(parameters):
                parameter.grad.fill_(0.1 * (number + index + 1))
        twins.plain.step()
        twins.zero.step()
        twins.check()


@every_layout
@on_ranks(2, 4)
def test_changed_trainability_is_followed_with_a_warning(options):
    parameters = make_parameters(9, (3, 5), 7, (2, 2))
    parameters[3].requires_grad_(False)
    twins = Twins(parameters=parameters, options=options)
    with heard() as texts:
        twins.step(2)
    assert texts == []
    for index, trainable in [(0, False), (3, True), (0, True), (1, False)]:
        for twin in (twins.sharded, twins.unsharded):
            twin[index].requires_grad_(trainable)
        with heard() as texts:
            twins.step(1, seed=1)
        assert len([t for t in texts if "trainable" in t or "requires_grad" in t]) == 1, texts
        with heard() as texts:
            twins.step(1, seed=2)
        assert texts == []


@on_ranks(2)
def test_hooks_of_the_optimizer_run_around_the_step():
    twins = Twins(torch.optim.SGD)
    calls = []
    twins.zero.register_step_pre_hook(lambda optimizer, args, kwargs: calls.append("pre"))
    twins.zero.register_step_post_hook(lambda optimizer, args, kwargs: calls.append("post"))
    twins.step(2)
    assert calls == ["pre", "post"] * 2


def halve_gradients(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad.mul_(0.5)


@contextlib.contextmanager
def hooks_of_all_optimizers(before, after):
    handles = [
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@ours
@every_sharding
@on_ranks(2)
def test_hooks_of_all_optimizers_run_once(options):
    """For ours, not again for the local optimizer, whose own hooks run all the same."""
    twins = Twins(torch.optim.SGD, options=options, momentum=0.9)
    calls = []
    twins.zero.optim.register_step_pre_hook(lambda *_: calls.append("local"))

    def after(optimizer, args, kwargs):
        calls.append("ours" if optimizer is twins.zero else "another")

    with hooks_of_all_optimizers(halve_gradients, after):
        twins.step(3)
    assert calls == ["another", "local", "ours"] * 3
    twins.step(1)
    assert len(calls) == 10


@ours
@on_ranks(2)
def test_hooks_of_all_optimizers_run_once_with_several_local_ones():
    made = make_parameters((4, 4), 5)
    groups = [{"params": made[:1], "optimizer_class": torch.optim.Muon}, {"params": made[1:]}]
    zero = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.1)
    set_gradients(made, 0)
    calls = []
    with hooks_of_all_optimizers(lambda *_: calls.append("pre"), lambda *_: calls.append("post")):
        zero.step()
    assert calls == ["pre", "post"]


@ours
@on_ranks(1)
def test_hooks_of_all_optimizers_run_inside_a_closure():
    """For an optimizer that the closure steps, and if it registers one itself."""
    twins = Twins(torch.optim.SGD)
    inner = torch.optim.SGD(make_parameters(3), lr=0.1)
    calls, handles = [], []

    def closure():
        if not handles:
            handles.append(register_optimizer_step_pre_hook(lambda *_: calls.append("late")))
        inner.step()
        return 1.0

    def before(optimizer, args, kwargs):
        calls.append("inner" if optimizer is inner else "ours")

    with hooks_of_all_optimizers(before, lambda *_: None):
        twins.zero.step(closure)
        assert calls == ["ours", "inner", "late"]
        twins.zero.step()
        assert calls[3:] == ["ours", "late"]
        handles[0].remove()
        twins.zero.step()
        assert calls[5:] == ["ours"]


class StepsInAThread(torch.optim.SGD):
    """Another optimizer steps in another thread meanwhile."""

    def step(self, closure=None):
        thread = threading.Thread(target=OTHER.step)
        thread.start()
        thread.join()
        return super().step(closure)


OTHER = torch.optim.SGD(make_parameters(3), lr=0.1)


@ours
@on_ranks(1)
def test_hooks_of_all_optimizers_run_in_other_threads():
    zero = ZeroRedundancyOptimizer(make_parameters(3), StepsInAThread, lr=0.1)
    seen = []
    with hooks_of_all_optimizers(lambda optimizer, *_: seen.append(optimizer), lambda *_: None):
        zero.step()
    assert len(seen) == 2 and seen[0] is zero and seen[1] is OTHER


@every_sharding
@on_ranks(2)
def test_two_optimizers_share_a_group(options):
    first = Twins(options=options)
    second = Twins(torch.optim.SGD, make_parameters((4, 4), 3, seed=9), options=options)
    for number in range(3):
        first.step(1, seed=number)
        second.step(1, seed=number)


@pytest.mark.parametrize("call", ["step", "consolidate_state_dict"])
@every_sharding
@on_ranks(2, timeout=20)
def test_other_threads_run_while_a_rank_waits(call, options):
    """Rank 1 makes its call when a thread of rank 0 says so, while rank 0 is in its own."""
    store = dist.distributed_c10d._get_default_store()
    parameters = make_parameters(9, (3, 5), 7, (2, 2))
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1, momentum=0.9, **options)
    set_gradients(parameters, seed=0)
    if call != "step":
        zero.step()
    if dist.get_rank() == 0:

        def signal():
            for _ in range(1000):
                time.sleep(0)  # lets go of the GIL, so that the call gets on to where it waits
            store.set("go", "1")

        thread = threading.Thread(target=signal)
        thread.start()
        getattr(zero, call)()
        thread.join()
    else:
        store.get("go")
        getattr(zero, call)()
    assert_same_on_all_ranks(parameters)


@ours
@every_sharding
@on_ranks(2, timeout=20)
def test_an_error_in_the_local_step_is_not_lost(options):
    """Each rank raises its own."""

    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no more steps")

    zero = ZeroRedundancyOptimizer(
        make_parameters(4, 5), Failing, lr=0.1, **said_elementwise(options)
    )
    with pytest.raises(RuntimeError, match="no more steps"):
        zero.step()
    assert gathered(True) == [True, True]
