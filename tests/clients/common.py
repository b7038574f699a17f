"""The small training run that every program here makes."""

import contextlib

import shardstep
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

KINDS = ("plain", "stage1", "stage2")
STEPS, HALF, ACCUMULATE, BATCH = 6, 3, 2, 2
CLIP, RATE = 0.05, 1e-2
ADAMW = {"lr": RATE, "weight_decay": 0.01}


def make_model() -> nn.Module:
    """Has parameters of 4096 elements, from which on an 8-bit state has 8 bits."""
    torch.manual_seed(0)
    layers = [nn.Linear(7, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(64, 3))


class Examples(Dataset):
    def __len__(self) -> int:
        return STEPS * ACCUMULATE * BATCH * 2

    def __getitem__(self, index: int):
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(7, generator=generator)
        return inputs, inputs[:3].sin()


def make_optimizer(kind: str, params):
    """`kind`: plain (torch's AdamW, under DDP), stage1 or stage2 (ours)."""
    if kind == "plain":
        return torch.optim.AdamW(params, **ADAMW)
    sharding = "parameter" if kind == "stage1" else "element"
    return shardstep.ZeroRedundancyOptimizer(
        params, torch.optim.AdamW, stage=int(kind[-1]), sharding=sharding, **ADAMW
    )


def loss_of(model: nn.Module, batch) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs).float(), targets)


class Loop:
    """A loop of one's own: it accumulates, clips and steps a schedule.

    `forward` is the model, under DistributedDataParallel unless the optimizer is of stage 2.
    """

    def __init__(self, model: nn.Module, forward: nn.Module, optimizer, bf16: bool = False) -> None:
        self.model, self.forward, self.optimizer = model, forward, optimizer
        self._bf16 = bf16
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.losses: list[float] = []

    def train(self, steps: range) -> None:
        for step in steps:
            self.losses.append(0.0)
            for pass_ in range(ACCUMULATE):
                last = pass_ == ACCUMULATE - 1
                with contextlib.nullcontext() if last else self._no_sync():
                    self._pass(step * ACCUMULATE + pass_)
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    def _no_sync(self):
        wrapped = isinstance(self.forward, DistributedDataParallel)
        return (self.forward if wrapped else self.optimizer).no_sync()

    def _pass(self, number: int) -> None:
        examples = Examples()
        first = (2 * number + dist.get_rank()) * BATCH
        rows = [examples[index] for index in range(first, first + BATCH)]
        batch = [torch.stack(column) for column in zip(*rows, strict=True)]
        with torch.autocast("cpu", torch.bfloat16, enabled=self._bf16):
            loss = loss_of(self.forward, batch)
        loss.backward()
        self.losses[-1] += loss.item()

    def result(self) -> dict[str, torch.Tensor]:
        """The parameters, and the losses of the second half."""
        return {**self.model.state_dict(), "losses": torch.tensor(self.losses[-HALF:])}
