"""Code that drives an optimizer: schedulers, GradScaler."""

import copy
import functools

import device as devices
import pytest
import torch
from helpers import Twins, every_sharding, everywhere, heard, on_ranks, ours
from torch.optim import lr_scheduler

SCHEDULERS = {
    "step": functools.partial(lr_scheduler.StepLR, step_size=2, gamma=0.5),
    "multi_step": functools.partial(lr_scheduler.MultiStepLR, milestones=[1, 3]),
    "exponential": functools.partial(lr_scheduler.ExponentialLR, gamma=0.7),
    "lambda": functools.partial(
        lr_scheduler.LambdaLR, lr_lambda=[lambda epoch: 0.5**epoch, lambda epoch: 1 / (1 + epoch)]
    ),
    "cosine": functools.partial(lr_scheduler.CosineAnnealingLR, T_max=4),
    "restarts": functools.partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2),
    "linear": functools.partial(lr_scheduler.LinearLR, total_iters=3),
    "one_cycle": functools.partial(lr_scheduler.OneCycleLR, max_lr=[0.5, 0.1], total_steps=6),
    "cyclic": functools.partial(
        lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.2, step_size_up=2, cycle_momentum=False
    ),
}


def make_twins(options):
    groups = [{"count": 2, "lr": 0.3}, {"count": 2}]
    return Twins(torch.optim.SGD, groups=groups, options=options, momentum=0.9)


@every_sharding
@on_ranks(2)
def test_schedulers(options):
    for name, make in SCHEDULERS.items():
        twins = make_twins(options)
        with heard() as texts:
            schedules = [make(optimizer) for optimizer in (twins.zero, twins.plain)]
            rates = []
            for number in range(6):
                twins.step(1, seed=number)
                rates.append([group["lr"] for group in twins.zero.optim.param_groups])
                if number < 5:
                    for schedule in schedules:
                        schedule.step()
        assert [t for t in texts if "optimizer.step()" in t] == [], name  # it saw the steps
        assert schedules[0].get_last_lr() == schedules[1].get_last_lr(), name
        assert rates[-1] == schedules[0].get_last_lr(), name
        assert len({tuple(rate) for rate in rates}) > 1, name
        momenta = [[g["momentum"] for g in o.param_groups] for o in (twins.zero, twins.plain)]
        assert momenta[0] == momenta[1], name


@every_sharding
@on_ranks(2)
def test_several_schedulers_at_once(options):
    twins = make_twins(options)
    names = ("step", "cosine", "exponential")
    schedules = [[SCHEDULERS[n](o) for n in names] for o in (twins.zero, twins.plain)]
    for number in range(5):
        twins.step(1, seed=number)
        for several in schedules:
            for schedule in several:
                schedule.step()
        assert schedules[0][-1].get_last_lr() == schedules[1][-1].get_last_lr()


@every_sharding
@on_ranks(2)
def test_plateau(options):
    twins = make_twins(options)
    schedules = [
        lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        for optimizer in (twins.zero, twins.plain)
    ]
    for number, loss in enumerate([1.0, 2.0, 3.0, 0.5, 0.6]):
        twins.step(1, seed=number)
        for schedule in schedules:
            schedule.step(loss)
    assert [group["lr"] for group in twins.zero.param_groups] == [0.3 / 8, 0.1 / 8]


@on_ranks(2)
def test_scheduler_goes_on_after_loading():
    twins = make_twins({})
    schedules = [SCHEDULERS["step"](optimizer) for optimizer in (twins.zero, twins.plain)]
    for number in range(3):
        twins.step(1, seed=number)
        for schedule in schedules:
            schedule.step()
    state = everywhere(twins.zero)
    assert "initial_lr" in state["param_groups"][0]
    twins.zero.load_state_dict(copy.deepcopy(state))
    twins.plain.load_state_dict(copy.deepcopy(state))
    for number in range(3):
        twins.step(1, seed=number)
        for schedule in schedules:
            schedule.step()
    assert twins.zero.optim.param_groups[0]["lr"] == 0.3 * 0.25


@pytest.mark.parametrize(
    "optimizer_class, defaults",
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {}),
        # The scaler leaves unscaling to those who say that they can, and torch's ZeRO hides it.
        pytest.param(torch.optim.AdamW, {"fused": True}, marks=ours),
    ],
)
@every_sharding
@on_ranks(2, 4)
def test_grad_scaler(optimizer_class, defaults, options):
    """Scaled gradients, one of them infinite: both skip that step and lower the scale."""
    twins = Twins(optimizer_class, options=options, **defaults)
    scale = {"init_scale": 8.0, "growth_interval": 2}
    scalers = [torch.amp.GradScaler(devices.NAME, **scale) for _ in range(2)]
    skipped = []
    for number in range(6):
        before = [p.detach().clone() for p in twins.sharded]
        twins.set_gradients(number)
        for parameters, optimizer, scaler in (
            (twins.sharded, twins.zero, scalers[0]),
            (twins.unsharded, twins.plain, scalers[1]),
        ):
            scaler.scale(torch.ones(1))
            for index, parameter in enumerate(parameters):
                parameter.grad *= scaler.get_scale()
                if (number, index) in ((1, 0), (4, 3)):
                    parameter.grad.view(-1)[0] = float("inf")
            if number % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            scaler.step(optimizer)
            scaler.update()
        twins.check()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        if all(map(torch.equal, before, twins.sharded)):
            skipped.append(number)
    assert skipped == [1, 4]
