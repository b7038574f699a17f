"""What narrow gradients cost in training: the example's model, with the gradients of several ranks
rounded as gradient_dtype rounds them, in one process. The last rows carry a rank's rounding errors
to its next step (a residual, as large as the model on each rank), which ours does not.

The loss is the mean over the last tenth of the steps: the median over the seeds, and each seed's.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from table import markdown
from train_gpt import OPTIMIZERS, TEXT, Gpt, Text, batches, warm_up_and_decay

Rounding = Callable[[torch.Tensor], torch.Tensor]


def in_blocks(gradient: torch.Tensor) -> torch.Tensor:
    """As src/comm/gradient_blocks.h."""
    size = gradient.numel()
    blocks = F.pad(gradient.flatten(), (0, -size % 256)).view(-1, 256)
    scales = blocks.abs().amax(1, keepdim=True).div(127).clamp_min(torch.finfo().tiny)
    return blocks.div(scales).round().mul(scales).flatten()[:size].view_as(gradient)


ROUNDINGS: dict[str, Rounding] = {
    "float32": lambda gradient: gradient,
    "bfloat16": lambda gradient: gradient.bfloat16().float(),
    "int8": in_blocks,
}


def train(rounding: Rounding, residual: bool, options: argparse.Namespace, seed: int) -> float:
    text = Text(TEXT.read_bytes())
    torch.manual_seed(seed)
    model = Gpt(len(text.vocabulary), layers=1, width=options.width, heads=4, context=64)
    optimizer_class, defaults = OPTIMIZERS[options.optimizer]
    optimizer = optimizer_class(model.parameters(), **defaults)
    schedule = warm_up_and_decay(optimizer, options.steps, 0)
    feeds = [batches(text, 64, 16, seed, rank, options.ranks) for rank in range(options.ranks)]
    params = list(model.parameters())
    errors = [[torch.zeros_like(param) for param in params] for _ in feeds]
    losses = []
    for _ in range(options.steps):
        sums = [torch.zeros_like(param) for param in params]
        total = 0.0
        for feed, carried in zip(feeds, errors, strict=True):
            given, wanted = next(feed)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(given).flatten(0, 1), wanted.flatten())
            loss.backward()
            total += loss.item() / options.ranks
            for param, sum_, error in zip(params, sums, carried, strict=True):
                whole = param.grad + error if residual else param.grad
                sent = rounding(whole)
                if residual:
                    error.copy_(whole - sent)
                sum_.add_(sent)
        for param, sum_ in zip(params, sums, strict=True):
            param.grad = sum_ / options.ranks
        optimizer.step()
        schedule.step()
        losses.append(total)
    tail = losses[-max(1, options.steps // 10) :]
    return sum(tail) / len(tail)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=400, help="of training (default 400)")
    add("--ranks", type=int, default=2, help="whose gradients are rounded (default 2)")
    add("--seeds", type=int, default=5, help="runs per row (default 5)")
    add("--width", type=int, default=64, help="of the model (default 64)")
    add("--optimizer", choices=("adamw", "sgd"), default="adamw")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [(name, False) for name in ROUNDINGS] + [("bfloat16", True), ("int8", True)]
    table = {}
    for name, residual in rows:
        found = [train(ROUNDINGS[name], residual, options, seed) for seed in range(options.seeds)]
        row = {f"seed {seed}": loss for seed, loss in enumerate(found)}
        table[name + (", residual" if residual else "")] = {
            "median": statistics.median(found),
            **row,
        }
        print(name, residual, found, file=sys.stderr, flush=True)
    columns = {key: lambda row, key=key: f"{row[key]:.3f}" for key in table["float32"]}
    print(markdown("gradients", columns, table))


if __name__ == "__main__":
    main()
