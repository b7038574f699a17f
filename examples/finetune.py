#!/usr/bin/env python3
"""Fine-tunes a transformer with stage 2: bfloat16 parameters with float32 masters, clipping, a
schedule, checkpoints that survive a crash.

  torchrun --standalone --nproc-per-node 2 examples/finetune.py --runs runs

Start it again with the same --runs, on any number of ranks, and it goes on after the last
checkpoint. The model is built from the numbers below, so nothing is downloaded; --weights starts
from a checkpoint of another run. Copy this file, and replace make_model() and make_batches().
"""

import argparse
import logging
import os

import shardstep
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

VOCABULARY, WIDTH, HEADS, LAYERS, CONTEXT = 128, 64, 4, 2, 32


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=self.head.weight.dtype)
        x = self.token(tokens) + self.position.weight[:length]
        return self.head(self.blocks(x, mask=mask, is_causal=True))


def make_batches(seed: int, rows: int):
    """Sequences that count upwards from a random number: something to learn in seconds."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        first = torch.randint(VOCABULARY, (rows, 1), generator=generator)
        yield (first + torch.arange(CONTEXT + 1)) % VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", default="runs", help="directory of the checkpoints")
    parser.add_argument("--weights", help="start from the weights of this checkpoint")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rows", type=int, default=16, help="sequences per rank and step")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = LanguageModel()
    if options.weights:
        shardstep.Checkpoint(options.weights).load_module(model)
    model.to(getattr(torch, options.dtype))
    optimizer = shardstep.ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        stage=2,
        sharding="element",
        module=model,  # starts as rank 0's
        master_dtype=torch.float32,  # of bfloat16 parameters, each rank for what it owns
        lr=3e-3,
        weight_decay=0.01,
        fused=True,
    )
    warm_up = options.steps // 10 + 1
    schedule = SequentialLR(
        optimizer,
        [
            LinearLR(optimizer, 0.1, total_iters=warm_up),
            CosineAnnealingLR(optimizer, max(1, options.steps - warm_up)),
        ],
        [warm_up],
    )
    done = 0
    latest = os.path.join(options.runs, "latest")
    if os.path.exists(latest):
        done = optimizer.load_checkpoint(latest, module=model, schedulers=[schedule])["step"]
    if rank == 0:
        print(f"from step {done} on {dist.get_world_size()} ranks", flush=True)
        optimizer.log_stats(every=options.every)

    batches = make_batches(1 + rank + 1000 * done, options.rows)
    for step in range(done + 1, options.steps + 1):
        tokens = next(batches)
        optimizer.zero_grad()
        scores = model(tokens[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()  # gradients travel to their owners meanwhile
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % options.every == 0 or step == options.steps:
            optimizer.save_checkpoint(
                os.path.join(options.runs, "{step:06d}"),
                module=model,
                extra={"step": step},
                schedulers=[schedule],
                keep_last=2,
                asynchronous=True,  # written while training goes on
            )
            if rank == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
    optimizer.wait_checkpoint()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
