"""The same model twice, on every rank: in stage 2, and under DDP with the plain optimizer.

Code that knows nothing about either must have the same effect on both."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from shardstep import ZeroRedundancyOptimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VARIANTS = [
    {"sharding": "element", "exchange": "shared_memory"},
    {"sharding": "parameter", "exchange": "pairwise"},
    {"sharding": "element", "exchange": "native"},
]


class Net(nn.Module):
    """A layer that only rank 0 uses, and one that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(13, 17)
        self.sometimes = nn.Linear(17, 17)
        self.never = nn.Linear(5, 5)
        self.last = nn.Linear(17, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if dist.get_rank() == 0:
            x = self.sometimes(x)
        return self.last(x)


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(6, 13, generator=torch.Generator().manual_seed(100 * step + rank))


class Twins:
    """`each(f)` calls f(model, optimizer) for both and returns both results, ours first."""

    def __init__(
        self,
        options: dict[str, Any],
        optimizer=torch.optim.SGD,
        overlap_forward: bool = False,
        **defaults: Any,
    ) -> None:
        defaults = {"lr": 0.1, **defaults}
        self.net, self.plain = Net(), Net()
        self.ddp = DistributedDataParallel(self.plain, find_unused_parameters=True)
        self.zero = ZeroRedundancyOptimizer(
            self.net.parameters(),
            optimizer,
            stage=2,
            module=self.net,
            overlap_forward=overlap_forward,
            **options,
            **defaults,
        )
        self.optimizer = optimizer(self.plain.parameters(), **defaults)

    def each(self, do: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> tuple[Any, Any]:
        return do(self.net, self.zero), do(self.plain, self.optimizer)

    def backward(self, step: int, scale: float = 1.0) -> None:
        (self.net(batch(step)).square().mean() * scale).backward()
        (self.ddp(batch(step)).square().mean() * scale).backward()

    def step(self) -> None:
        self.each(lambda _, optimizer: optimizer.step())
        self.check()

    def check(self, rtol: float = 1e-5, atol: float = 1e-7) -> None:
        for (name, ours), theirs in zip(
            self.net.named_parameters(), self.plain.parameters(), strict=True
        ):
            torch.testing.assert_close(
                ours, theirs, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
            )

    def check_gradients(self, rtol: float = 1e-5) -> None:
        for ours, theirs in zip(self.net.parameters(), self.plain.parameters(), strict=True):
            whole = self.zero.full_gradient(ours)
            assert (whole is None) == (theirs.grad is None)
            if whole is not None:
                torch.testing.assert_close(whole, theirs.grad, rtol=rtol, atol=1e-7)
