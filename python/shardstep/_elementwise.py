"""Which optimizers may run on a part of a parameter. The engine has the list of them."""

from typing import Any

import torch

from shardstep import _C
from shardstep._param_groups import name_of, unwrapped


def is_known_elementwise(optimizer_class: Any) -> bool:
    """Whether this is one of torch's classes that update each element on its own.

    A subclass may do anything in its step, so subclasses are not known.
    """
    cls, _ = unwrapped(optimizer_class)
    name = name_of(cls)
    return getattr(torch.optim, name, None) is cls and _C.is_known_elementwise(name)


def check_optimizer_class(optimizer_class: Any, sharding: str, elementwise: bool) -> None:
    """Raises ValueError for an optimizer that would train differently when sharded this way."""
    cls, _ = unwrapped(optimizer_class)
    if isinstance(cls, type) and issubclass(cls, torch.optim.LBFGS):
        refuse_lbfgs(cls)
    if sharding == "element" and not elementwise:
        raise ValueError(
            "shardstep: expected an optimizer that is known to be element-wise when sharding by "
            f"element, got {name_of(cls)}; if its update of an element depends on nothing but that "
            "element's gradient and state, pass elementwise=True; otherwise shard by parameter"
        )


def refuse_lbfgs(cls: type) -> None:
    raise ValueError(
        "shardstep: expected an optimizer that updates each parameter on its own, got "
        f"{cls.__name__}, whose step depends on the gradients of all parameters (LBFGS); use it "
        "without ZeroRedundancyOptimizer"
    )
