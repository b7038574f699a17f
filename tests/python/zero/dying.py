"""A training loop in which ranks are killed."""

import os
import signal
import time
from collections.abc import Callable, Container

import torch
import torch.distributed as dist
from torch import nn


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_until_death(
    net: nn.Module,
    zero: torch.optim.Optimizer,
    batch: Callable[[int], torch.Tensor],
    lost: Container[int],
    where: str,
) -> tuple[str, float]:
    """The error that a survivor gets, and after how many seconds of training.

    The ranks in `lost` die in step 3: in "forward" (after it), "backward", "after backward",
    "buffers" or "update".
    """
    begin = time.monotonic()
    try:
        for step in range(100):
            dies = step == 3 and dist.get_rank() in lost
            zero.zero_grad()
            loss = net(batch(step)).square().mean()
            if dies and where == "forward":
                die()
            elif dies and where == "backward":
                net.first.weight.register_hook(die)
            elif dies and where == "buffers":
                net.buffers = die  # read when they are sent
            elif dies and where == "update":
                zero.optim.step = die
            loss.backward()
            if dies and where == "after backward":
                die()
            zero.step()
    except RuntimeError as error:
        return str(error), time.monotonic() - begin
    return "went on", 0.0
