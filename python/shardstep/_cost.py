"""What the update of a parameter costs, which sharding by parameter divides among the ranks."""

from collections.abc import Callable
from typing import Any

import torch

from shardstep import _C
from shardstep._param_groups import unwrapped

Cost = Callable[[torch.Tensor], float]


def own_cost(optimizer_class: Any) -> Cost | None:
    """The cost that is known for a class; None where it is the number of elements."""
    cls, arguments = unwrapped(optimizer_class)
    muon = getattr(torch.optim, "Muon", None)
    if muon is None or not isinstance(cls, type) or not issubclass(cls, muon):
        return None
    steps = arguments.get("ns_steps", 5)
    return lambda param: _C.muon_cost(param.detach(), steps)


def costs_of(params: list[torch.Tensor], cost: Cost | None) -> list[float]:
    """By parameter; empty without a function."""
    return [] if cost is None else [float(cost(param)) for param in params]
