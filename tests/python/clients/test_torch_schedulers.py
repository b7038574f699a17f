"""torch's learning rate schedulers, and GradScaler with autocast."""

import device as devices
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.optim import lr_scheduler
from training import (
    SHARDINGS,
    assert_differ,
    assert_equal,
    loss_of,
    make_model,
    make_optimizer,
    parameters_of,
    train,
)

STEPS = 12


def sequential(optimizer):
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
    decay = lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS - 4)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, decay], milestones=[4])


SCHEDULERS = {
    # It also cycles Adam's betas.
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.05, 0.02], total_steps=STEPS + 1),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS, eta_min=1e-4),
    # Anything but a fall to a third within a step is a plateau.
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1, threshold=0.66),
    "sequential": sequential,
}


def scheduled_run(name, sharding, stop_after=STEPS):
    """Parameters and learning rates; interrupted after some steps, it resumes with new objects."""
    rates, betas = [], []

    def build():
        model = make_model()
        weights = [p for p in model.parameters() if p.dim() > 1]
        biases = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": weights}, {"params": biases, "lr": 3e-3}]
        optimizer = make_optimizer(sharding, groups, torch.optim.Adam, lr=1e-2)
        return model, optimizer, SCHEDULERS[name](optimizer)

    model, optimizer, scheduler = build()

    def after_step(loss):
        if name == "plateau":
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            scheduler.step(mean)
        else:
            scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
        betas.append([group["betas"] for group in optimizer.param_groups])

    train(model, optimizer, range(stop_after), after_step)
    if stop_after < STEPS:
        saved = [model.state_dict(), consolidated_everywhere(optimizer), scheduler.state_dict()]
        model, optimizer, scheduler = build()
        for part, state in zip((model, optimizer, scheduler), saved, strict=True):
            part.load_state_dict(state)
        train(model, optimizer, range(stop_after, STEPS), after_step)
    return parameters_of(model), rates, betas


def consolidated_everywhere(optimizer):
    if hasattr(optimizer, "consolidate_state_dict"):
        for rank in range(dist.get_world_size()):
            optimizer.consolidate_state_dict(to=rank)
            if rank == dist.get_rank():
                mine = optimizer.state_dict()
        return mine
    return optimizer.state_dict()


def check_scheduler(name, sharding):
    expected = scheduled_run(name, None)
    assert_equal(scheduled_run(name, sharding), expected)
    assert_equal(scheduled_run(name, sharding, stop_after=5), expected)
    _, rates, betas = expected
    assert len({rate for rate, _ in rates}) > 2
    assert len({beta for beta, _ in betas}) == (1 if name != "one_cycle" else STEPS)


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler(name, sharding):
    run_ranks(2, check_scheduler, name, sharding)


def scaled_run(sharding, fused):
    """Parameters after every step, and the scales."""
    model = make_model()
    optimizer = make_optimizer(
        sharding, model.parameters(), torch.optim.AdamW, lr=1e-2, fused=fused
    )
    scaler = torch.amp.GradScaler(devices.NAME, init_scale=1024.0, growth_interval=3)
    history, scales = [parameters_of(model)], []
    for step in range(8):
        optimizer.zero_grad()
        with torch.autocast(devices.NAME, dtype=torch.bfloat16):
            loss = loss_of(model, step)
        if step == 4 and dist.get_rank() == 1:
            loss = loss * torch.inf  # one rank overflows, and DDP tells the other
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        history.append(parameters_of(model))
        scales.append(scaler.get_scale())
    return history, scales


def check_scaler(sharding, fused):
    expected_history, expected_scales = scaled_run(None, fused)
    history, scales = scaled_run(sharding, fused)
    assert scales == expected_scales == [1024.0] * 2 + [2048.0] * 2 + [1024.0] * 3 + [2048.0]
    assert_equal(history, expected_history)
    assert_equal(history[5], history[4])  # the step with the overflow was skipped
    assert_differ(history[6], history[5])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_grad_scaler(sharding, fused):
    run_ranks(2, check_scaler, sharding, fused)
