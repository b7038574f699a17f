"""Training loops as people write them, with more in them than one model and one loss. Each runs
unchanged under DDP with the plain optimizer and in stage 2, and must end with the same model."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from shardstep import ZeroRedundancyOptimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

WIDTH = 24
STEPS = 4

# What a program gets instead of DistributedDataParallel(model) and optimizer_class(parameters).
Wrap = Callable[..., tuple[nn.Module, torch.optim.Optimizer]]


def under_ddp(model: nn.Module, optimizer_class, **defaults):
    ddp = DistributedDataParallel(model)
    return ddp, optimizer_class(model.parameters(), **defaults)


def in_stage_2(**options) -> Wrap:
    def wrap(model: nn.Module, optimizer_class, **defaults):
        zero = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class, stage=2, module=model, **options, **defaults
        )
        return model, zero

    return wrap


def net(seed: int, outputs: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, outputs)]
    return nn.Sequential(*layers).double()


def batch(step: int, purpose: int = 0) -> torch.Tensor:
    seed = 1000 * purpose + 10 * step + dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)


def adversaries(wrap: Wrap) -> list[nn.Module]:
    """The generator's loss leaves gradients in the discriminator, which its next step must not
    see; both have an optimizer of their own."""
    generator, discriminator = net(1), net(2, 1)
    make, make_optimizer = wrap(generator, torch.optim.Adam, lr=1e-2)
    judge, judge_optimizer = wrap(discriminator, torch.optim.Adam, lr=1e-2)
    for step in range(STEPS):
        made = make(batch(step))
        judge_optimizer.zero_grad()
        judge(torch.cat([batch(step, 1), made.detach()])).square().mean().backward()
        judge_optimizer.step()
        make_optimizer.zero_grad()
        (judge(made) - 1).square().mean().backward()
        make_optimizer.step()
    return [generator, discriminator]


def gradient_penalty(wrap: Wrap) -> list[nn.Module]:
    model = net(1, 1)
    call, optimizer = wrap(model, torch.optim.SGD, lr=1e-2)
    for step in range(STEPS):
        inputs = batch(step).requires_grad_()
        # Under DDP the inner gradients must not go through its hooks, so the module is called.
        outputs = model(inputs)
        (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        loss = call(inputs.detach()).square().mean() + (slopes.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [model]


def compiled(wrap: Wrap) -> list[nn.Module]:
    model = net(1)
    call, optimizer = wrap(model, torch.optim.AdamW, lr=1e-2)
    fast = torch.compile(call, backend="aot_eager")
    for step in range(STEPS):
        optimizer.zero_grad()
        fast(batch(step)).square().mean().backward()
        optimizer.step()
    return [model]


def moving_average(wrap: Wrap) -> list[nn.Module]:
    model = net(1)
    call, optimizer = wrap(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(STEPS):
        optimizer.zero_grad()
        call(batch(step)).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
    return [model, average]


def clipped_by_part(wrap: Wrap) -> list[nn.Module]:
    """And rank 0 alone logs norms, before the step."""
    model = net(1)
    call, optimizer = wrap(model, torch.optim.SGD, lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        (100 * call(batch(step)).square().mean()).backward()
        for layer, limit in ((model[0], 1.0), (model[2], 0.5)):
            clip_grad_norm_(layer.parameters(), limit)
        if dist.get_rank() == 0:
            norms = [parameter.grad.data.norm(2).item() for parameter in model.parameters()]
            assert all(0 < norm <= 1.001 for norm in norms), norms
        optimizer.step()
    return [model]


def recomputed(reentrant: bool) -> Callable[[Wrap], list[nn.Module]]:
    def program(wrap: Wrap) -> list[nn.Module]:
        model = net(1)
        model[0].register_forward_pre_hook(lambda module, args: None)  # makes no difference
        call, optimizer = wrap(Recomputing(model, reentrant), torch.optim.Adam, lr=1e-2)
        for step in range(STEPS):
            optimizer.zero_grad()
            call(batch(step)).square().mean().backward()
            optimizer.step()
        return [model]

    return program


class Recomputing(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)


def two_losses(wrap: Wrap) -> list[nn.Module]:
    """Two backward passes through one graph, and a third for a part of the parameters."""
    model = net(1)
    call, optimizer = wrap(model, torch.optim.SGD, lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        outputs = call(batch(step))
        loss = outputs.square().mean()
        if isinstance(call, DistributedDataParallel):  # it takes one backward per forward
            (loss + outputs.abs().mean()).backward()
        else:
            loss.backward(retain_graph=True)
            outputs.abs().mean().backward()
        optimizer.step()
    return [model]


def frozen_in_turns(wrap: Wrap) -> list[nn.Module]:
    model = net(1)
    call, optimizer = wrap(model, torch.optim.Adam, lr=1e-2)
    for step in range(2 * STEPS):
        model[0].requires_grad_(step % 2 == 0)
        optimizer.zero_grad()
        if isinstance(call, DistributedDataParallel):  # its reducer knows what was trainable
            call = DistributedDataParallel(model)
        call(batch(step)).square().mean().backward()
        optimizer.step()
    return [model]


def penalised_by_hand(wrap: Wrap) -> list[nn.Module]:
    """Changes of gradients in place that are written out, as older code does."""
    model = net(1)
    call, optimizer = wrap(model, torch.optim.SGD, lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        call(batch(step)).square().sum().backward()
        total = torch.sqrt(sum(p.grad.detach().pow(2).sum() for p in model.parameters()))
        for parameter in model.parameters():
            parameter.grad.data.mul_(min(1.0, 1.0 / (total.item() + 1e-6)))
            parameter.grad.data.add_(parameter.data, alpha=0.01)
            parameter.grad /= 2
        optimizer.step()
    return [model]


PROGRAMS = {
    "adversaries": adversaries,
    "gradient penalty": gradient_penalty,
    "compiled": compiled,
    "moving average": moving_average,
    "clipped by part": clipped_by_part,
    "recomputed": recomputed(False),
    "recomputed, reentrant": recomputed(True),
    "two losses": two_losses,
    "frozen in turns": frozen_in_turns,
    "penalised by hand": penalised_by_hand,
}
VARIANTS = {
    "shared memory, by element": {"exchange": "shared_memory", "sharding": "element"},
    "pairwise, by parameter": {"exchange": "pairwise", "sharding": "parameter"},
    "native, by element": {"exchange": "native", "sharding": "element"},
    "overlap_forward": {"sharding": "element", "overlap_forward": True},
}


def compare(program: str, variant: str) -> None:
    ours = PROGRAMS[program](in_stage_2(bucket_cap_mb=0.005, **VARIANTS[variant]))
    theirs = PROGRAMS[program](under_ddp)
    for mine, plain in zip(ours, theirs, strict=True):
        # Norms are summed from the ranks' shares, and DDP adds in an order of its own.
        torch.testing.assert_close(
            parameters_to_vector(mine.parameters()),
            parameters_to_vector(plain.parameters()),
            rtol=1e-9,
            atol=1e-11,
        )


@pytest.mark.cpu("it names exchanges for CPU tensors")
@pytest.mark.part(20)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_ends_as_under_ddp(program, variant):
    run_ranks(2, compare, program, variant, timeout=60)
