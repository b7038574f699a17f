"""Stage 2: what generic code finds in `.grad`."""

import functools
import math
import time

import device as devices
import pytest
import torch
import torch.distributed as dist
from gradient_twins import VARIANTS, Twins, batch
from ranks import run_ranks
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

every_variant = pytest.mark.parametrize("options", VARIANTS, ids=lambda o: "-".join(o.values()))
two_and_three = pytest.mark.parametrize("ranks", [2, 3])


def close(ours, theirs) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def clips_by_norm(options, foreach):
    twins = Twins(options, torch.optim.SGD, momentum=0.9)
    for step in range(3):
        for norm_type in (2.0, 1.0, math.inf, 3.0):
            twins.each(lambda _, optimizer: optimizer.zero_grad())
            twins.backward(step)
            ours, theirs = twins.each(
                lambda net, _, norm_type=norm_type: clip_grad_norm_(
                    net.parameters(), 0.01, norm_type=norm_type, foreach=foreach
                )
            )
            assert theirs > 0.01  # there is something to clip
            close(ours, theirs)
            twins.step()
    twins.backward(9)  # a norm within the limit changes nothing
    close(*twins.each(lambda net, _: clip_grad_norm_(net.parameters(), 1e6, foreach=foreach)))
    twins.step()


@pytest.mark.part(8)
@two_and_three
@every_variant
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clip_grad_norm(ranks, options, foreach):
    run_ranks(ranks, clips_by_norm, options, foreach)


def clips_by_value(options):
    twins = Twins(options)
    for step, foreach in enumerate((None, True, False)):
        twins.each(lambda _, optimizer: optimizer.zero_grad())
        twins.backward(step)
        twins.each(lambda net, _, f=foreach: clip_grad_value_(net.parameters(), 1e-3, foreach=f))
        twins.step()


@two_and_three
@every_variant
def test_clip_grad_value(ranks, options):
    run_ranks(ranks, clips_by_value, options)


def clips_a_part(options):
    twins = Twins(options)
    for step in range(3):
        twins.each(lambda _, optimizer: optimizer.zero_grad())
        twins.backward(step)
        close(*twins.each(lambda net, _: clip_grad_norm_(net.first.parameters(), 1e-3)))
        close(*twins.each(lambda net, _: torch.nn.utils.get_total_norm(grads_of(net))))
        ours, theirs = twins.each(
            lambda net, _: torch.nn.utils.get_total_norm(grads_of(net.last), norm_type=1)
        )
        close(ours, theirs)
        twins.each(
            lambda net, _, total=theirs: torch.nn.utils.clip_grads_with_norm_(
                net.last.parameters(), 0.01, total
            )
        )
        twins.check_gradients()
        twins.step()


def grads_of(module):
    return [p.grad for p in module.parameters() if p.grad is not None]


@two_and_three
@every_variant
def test_clip_a_part_of_the_model(ranks, options):
    run_ranks(ranks, clips_a_part, options)


QUESTIONS = {
    "norm": lambda g: g.norm(),
    "norm of type 1": lambda g: g.norm(p=1),
    "detached norm": lambda g: g.detach().data.norm(2),
    "norm in float32": lambda g: g.detach().float().norm(2),
    "norm in float64": lambda g: g.double().norm(2).float(),
    "linalg.norm": lambda g: torch.linalg.norm(g),
    "torch.norm": lambda g: torch.norm(g.detach(), 2.0),
    "finite": lambda g: torch.isfinite(g).all(),
    "method isfinite": lambda g: g.isfinite().all(),
    "not finite": lambda g: (~torch.isfinite(g)).any(),
    "nan": lambda g: torch.isnan(g).any(),
    "inf": lambda g: torch.isinf(g).any(),
    "nans": lambda g: torch.isnan(g).sum(),
    "sum is finite": lambda g: g.sum().isfinite(),
    "sum": lambda g: g.sum(),
    "mean": lambda g: g.mean(),
    "std": lambda g: g.std(),
    "largest": lambda g: g.max(),
    "smallest": lambda g: g.min(),
    "largest absolute": lambda g: g.abs().max(),
    "mean absolute": lambda g: g.abs().mean(),
    "squares": lambda g: g.pow(2).sum(),
    "same device": lambda g: g.to(devices.current()).norm(),
    "shape": lambda g: torch.tensor([*g.shape, g.dim(), g.numel(), g.element_size()]),
    "zeros": lambda g: torch.zeros_like(g),
}


def answers(options, broken):
    twins = Twins(options)
    twins.backward(0)
    if broken is not None:
        for net in (twins.net, twins.plain):
            with torch.no_grad():
                net.first.weight.grad.mul_(broken)
    for name, question in QUESTIONS.items():
        for ours, theirs in zip(twins.net.parameters(), twins.plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None) or name == "norm"
            if theirs.grad is None:
                continue
            answer, expected = question(ours.grad), question(theirs.grad)
            assert answer.dtype == expected.dtype, name
            torch.testing.assert_close(
                answer,
                expected,
                rtol=1e-4,
                atol=1e-6,
                equal_nan=True,
                msg=lambda m, name=name: f"{name}: {m}",
            )


@pytest.mark.part(9)
@two_and_three
@every_variant
@pytest.mark.parametrize("broken", [None, math.inf, math.nan])
def test_questions(ranks, options, broken):
    run_ranks(ranks, answers, options, broken)


def changes_in_place(options):
    twins = Twins(options, torch.optim.SGD, momentum=0.9)

    def times(net, factor):
        for p in net.parameters():
            if p.grad is not None:
                p.grad *= factor

    def data_times(net):
        for p in net.parameters():
            if p.grad is not None:
                p.grad.data.mul_(torch.tensor(0.25))

    def divide(net):
        torch._foreach_div_(grads_of(net), 3.0)

    def decay(net):
        for p in net.parameters():
            if p.grad is not None:
                p.grad.add_(p.detach(), alpha=0.1)

    def assign_alias(net):
        for p in net.parameters():
            if p.grad is not None:
                p.grad = p.grad.detach()

    changes = [lambda net: times(net, 0.3), data_times, divide, decay, assign_alias]
    for step in range(3):
        twins.each(lambda _, optimizer: optimizer.zero_grad())
        twins.backward(step)
        for change in changes:
            twins.each(lambda net, _, change=change: change(net))
            close(*twins.each(lambda net, _: torch.nn.utils.get_total_norm(grads_of(net))))
        twins.step()


@two_and_three
@every_variant
def test_changes_in_place(ranks, options):
    run_ranks(ranks, changes_in_place, options)


class OwnUnscale(torch.amp.GradScaler):
    """As frameworks override it."""

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)


def clips_then_scales(make_scaler, options):
    twins = Twins(options, torch.optim.Adam, lr=1e-2)
    scalers = make_scaler(), make_scaler()
    for step in range(8):
        for model, optimizer, scaler in zip(
            (twins.net, twins.ddp), (twins.zero, twins.optimizer), scalers, strict=True
        ):
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            if step == 3 and dist.get_rank() == 1:
                loss = loss * math.inf  # on one rank
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        twins.check(rtol=1e-4, atol=1e-5)
    return scalers[0].get_scale()


@pytest.mark.part(9)
@two_and_three
@every_variant
@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, ShardedGradScaler, OwnUnscale])
def test_grad_scalers(ranks, options, scaler):
    make = functools.partial(scaler, devices.NAME, init_scale=2.0**16)
    assert run_ranks(ranks, clips_then_scales, make, options) == [2.0**15] * ranks


def one_rank_asks(options, who):
    twins = Twins(options)
    for step in range(3):
        twins.each(lambda _, optimizer: optimizer.zero_grad())
        twins.backward(step)
        if dist.get_rank() == who:
            norms = [p.grad.norm() for p in twins.net.parameters() if p.grad is not None]
            theirs = [p.grad.norm() for p in twins.plain.parameters() if p.grad is not None]
            for ours, expected in zip(norms, theirs, strict=False):
                close(ours, expected)
            assert bool(torch.isfinite(twins.net.first.weight.grad).all())
            if step != 1:  # the others have clipped by then
                close(*twins.each(lambda net, _: net.first.weight.grad.abs().max()))
        if step == 1:
            close(*twins.each(lambda net, _: clip_grad_norm_(net.parameters(), 0.01)))
        twins.step()


@two_and_three
@every_variant
def test_one_rank_alone_may_log_norms(ranks, options):
    for who in (0, ranks - 1):
        run_ranks(ranks, one_rank_asks, options, who)


def one_rank_asks_too_late(options):
    twins = Twins(options)
    twins.backward(0)
    twins.step()
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"shardstep.*\(rank"):
        if dist.get_rank() == 0:
            twins.net.first.weight.grad.norm()
        twins.zero.zero_grad()
        twins.net(batch(1)).square().mean().backward()
        twins.zero.step()
    return time.monotonic() - begin


@pytest.mark.cpu("it asks in an order of its own")
def test_one_rank_that_asks_after_the_step_is_an_error_everywhere():
    options = {"sharding": "element", "exchange": "shared_memory"}
    for seconds in run_ranks(3, one_rank_asks_too_late, options):
        assert seconds < 10


def one_rank_scales(options):
    twins = Twins(options)
    twins.backward(0)
    if dist.get_rank() == 0:
        twins.net.first.weight.grad.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"same changes.*on every rank.*\(rank"):
        twins.zero.step()
    twins.each(lambda _, optimizer: optimizer.zero_grad())
    twins.backward(1)
    twins.step()


@every_variant
def test_one_rank_that_scales_alone_is_an_error_everywhere(options):
    run_ranks(2, one_rank_scales, options)


def refuses():
    twins = Twins({"sharding": "element"})
    twins.backward(0)
    gradient = twins.net.first.weight.grad
    for ask in (
        lambda: gradient[0],
        lambda: gradient.numpy(),
        lambda: gradient.tolist(),
        lambda: gradient.clone(),
        lambda: gradient * 0.5,
        lambda: gradient == 0,
        lambda: gradient.norm(dim=0),
        lambda: torch.cat([gradient, gradient]),
        lambda: twins.net.first.weight.data.add_(gradient, alpha=-0.1),
        lambda: gradient.data_ptr(),
    ):
        with pytest.raises(NotImplementedError, match=r"full_gradient\(p\).*\(rank"):
            ask()
    assert "ShardedGradient" in repr(gradient)
    twins.step()


def test_what_cannot_be_answered_says_what_to_call():
    run_ranks(2, refuses)


def assigns(options):
    twins = Twins(options, torch.optim.SGD, momentum=0.9)
    twins.backward(0)
    for net in (twins.net, twins.plain):
        net.last.bias.grad = None  # is not updated
    twins.step()
    twins.each(lambda _, optimizer: optimizer.zero_grad())
    twins.backward(1)
    twins.net.last.bias.grad = torch.ones_like(twins.net.last.bias)
    with pytest.raises(RuntimeError, match=r"got another gradient for parameter 7.*\(rank"):
        twins.zero.step()


@every_variant
def test_an_assigned_gradient_is_honoured_or_refused(options):
    run_ranks(2, assigns, options)


def adds_up_over_steps(options, forget):
    twins = Twins(options, torch.optim.SGD, momentum=0.9)
    for step in range(6):
        if step == 3:
            forget(twins)
        twins.backward(step)
        if step == 4:
            close(*twins.each(lambda net, _: clip_grad_norm_(net.parameters(), 0.1)))
        twins.step()
        twins.check_gradients()


def by_optimizers(twins):
    twins.each(lambda _, optimizer: optimizer.zero_grad())


def by_models(twins):
    twins.each(lambda net, _: net.zero_grad())


def to_zero(twins):
    twins.each(lambda _, optimizer: optimizer.zero_grad(set_to_none=False))


def models_to_zero(twins):
    twins.each(lambda net, _: net.zero_grad(set_to_none=False))


def of_a_part(twins):
    twins.each(lambda net, _: net.first.zero_grad())


@pytest.mark.part(12)
@two_and_three
@every_variant
@pytest.mark.parametrize("forget", [by_optimizers, by_models, to_zero, models_to_zero, of_a_part])
def test_steps_without_zero_grad_add_up(ranks, options, forget):
    run_ranks(ranks, adds_up_over_steps, options, forget)


def without_a_batch(options, clip, overlap):
    twins = Twins(options, overlap_forward=overlap)
    scaler = torch.amp.GradScaler(devices.NAME, init_scale=8.0)
    idle = dist.get_world_size() - 1
    for step in range(4):
        twins.zero.zero_grad()
        if dist.get_rank() != idle or step == 0:
            scaler.scale(twins.net(batch(step)).square().mean()).backward()
        if clip:
            scaler.unscale_(twins.zero)
            twins.zero.clip_grad_norm_(0.1)
        scaler.step(twins.zero)
        scaler.update()
        # The plain optimizer, with the same average by hand.
        twins.optimizer.zero_grad()
        loss = twins.plain(batch(step)).square().mean()
        (loss * (dist.get_rank() != idle or step == 0)).backward()
        for p in twins.plain.parameters():
            given = torch.tensor([int(p.grad is not None)])
            dist.all_reduce(given)
            if given.item():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        if clip:
            clip_grad_norm_(twins.plain.parameters(), 0.1)
        twins.optimizer.step()
        twins.zero.wait()
        twins.check(atol=1e-6)


@pytest.mark.part(12)
@two_and_three
@every_variant
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_rank_without_a_batch(ranks, options, clip, overlap):
    run_ranks(ranks, without_a_batch, options, clip, overlap)
