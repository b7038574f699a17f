"""The device that the tests run on: SHARDSTEP_TEST_DEVICE is "cpu", the default, or "sim", the
simulated accelerator of tests/sim_device.

Tensors and modules that a test makes without naming a device are on this one. What shardstep and
torch make by themselves is not: they must get the device right on their own.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

NAME = os.environ.get("SHARDSTEP_TEST_DEVICE", "cpu")
BACKENDS = {"cpu": "gloo", "sim": "simccl"}

_MAKERS = (
    *("arange", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint"),
    *("randn", "randperm", "tensor", "zeros"),
)
_CALLERS = (str(Path(__file__).parent), str(Path(nn.modules.__file__).parent))


def current() -> torch.device:
    """What tensors of the tests are on."""
    if NAME == "cpu":
        return torch.device("cpu")
    return torch.device(NAME, torch.get_device_module(NAME).current_device())


def use(name: str, index: int | None = None) -> None:
    """Makes this the device of what the tests make in this process."""
    if name == "cpu":
        return
    import sim

    sim.activate()
    if index is not None:
        sim.set_device(index % sim.device_count())
    for maker in _MAKERS:
        made = getattr(torch, maker)
        if not hasattr(made, "on_cpu"):
            setattr(torch, maker, _on_device(made, name))


def _on_device(maker: Callable, name: str) -> Callable:
    @functools.wraps(maker)
    def make(*args: Any, **options: Any) -> torch.Tensor:
        caller = sys._getframe(1).f_code.co_filename
        if options.get("device") is not None or not caller.startswith(_CALLERS):
            return maker(*args, **options)
        if options.get("generator") is None:
            return maker(*args, **(options | {"device": name}))
        wants_gradient = options.pop("requires_grad", False)
        return maker(*args, **options).to(name).requires_grad_(wants_gradient)

    make.on_cpu = maker
    return make
