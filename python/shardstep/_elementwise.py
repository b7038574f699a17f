"""Which optimizers may run on a part of a parameter. The list of them is the engine's."""

import functools
from typing import Any

import torch

from shardstep import _C


def unwrapped(optimizer_class: Any) -> Any:
    """What functools.partial was made of."""
    while isinstance(optimizer_class, functools.partial):
        optimizer_class = optimizer_class.func
    return optimizer_class


def is_known_elementwise(optimizer_class: Any) -> bool:
    """Whether this is a class of torch's that updates each element on its own.

    A subclass may do anything in its step, so none is known.
    """
    cls = unwrapped(optimizer_class)
    name = getattr(cls, "__name__", "")
    return getattr(torch.optim, name, None) is cls and _C.is_known_elementwise(name)
