"""A small training run under DDP, which each client drives with our optimizer and with a plain one.

Each rank has its own batches. Gradients are averages over 2 ranks, so those of both runs are equal
bit for bit, and so must be the parameters.
"""

import torch
import torch.distributed as dist
from shardstep import ZeroRedundancyOptimizer
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

SHARDINGS = ("parameter", "element")


def make_model() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 20), nn.Tanh(), nn.Linear(20, 3)]
    return DistributedDataParallel(nn.Sequential(*layers), gradient_as_bucket_view=True)


def make_optimizer(sharding, parameters, optimizer_class, **defaults):
    """The plain optimizer if sharding is None."""
    if sharding is None:
        return optimizer_class(parameters, **defaults)
    return ZeroRedundancyOptimizer(parameters, optimizer_class, sharding=sharding, **defaults)


def batch(step: int, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(rows, 7, generator=generator)
    return inputs, inputs[:, :3].sin()


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    inputs, targets = batch(step)
    return F.mse_loss(model(inputs), targets)


def train(model: nn.Module, optimizer, steps: range, after_step=lambda loss: None) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        after_step(loss)


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_equal(actual, expected) -> None:
    """To the bit, dtypes and devices too."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def assert_differ(actual, expected) -> None:
    """Guards a comparison against runs in which nothing happens."""
    pairs = zip(actual, expected, strict=True)
    assert not any(torch.equal(a, b) for a, b in pairs)
