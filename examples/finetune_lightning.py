#!/usr/bin/env python3
"""finetune.py under Lightning: stage 2, bfloat16 parameters with float32 masters, clipping, a
schedule, Lightning's own checkpoints.

  pip install lightning
  python examples/finetune_lightning.py --runs runs

starts 2 ranks. Start it again with the same --runs and more --steps, and it goes on after the last
checkpoint.
"""

import argparse
import itertools
import os

import shardstep
import shardstep.integrations.lightning  # registers the strategy
import torch
from finetune import LanguageModel, make_batches
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, IterableDataset


class Batches(IterableDataset):
    """This rank's batches. After `step` steps, they are others than at first."""

    def __init__(self, rank: int, step: int, rows: int) -> None:
        self._seed, self._rows = 1 + rank + 1000 * step, rows

    def __iter__(self):
        return itertools.islice(make_batches(self._seed, self._rows), 1000)


class FineTuning(LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.model = LanguageModel()
        self._steps = steps

    def training_step(self, tokens: torch.Tensor, _: int) -> torch.Tensor:
        scores = self.model(tokens[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = shardstep.ZeroRedundancyOptimizer(
            self.parameters(),
            torch.optim.AdamW,
            stage=2,
            sharding="element",
            master_dtype=torch.float32,
            lr=3e-3,
            weight_decay=0.01,
            fused=True,
        )
        schedule = CosineAnnealingLR(optimizer, self._steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def train_dataloader(self) -> DataLoader:
        batches = Batches(self.global_rank, self.trainer.global_step, rows=16)
        return DataLoader(batches, batch_size=None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", default="runs", help="directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="shardstep",  # stage 2 averages gradients itself
        precision="bf16-true",
        gradient_clip_val=1.0,
        max_steps=options.steps,
        callbacks=[
            ModelCheckpoint(options.runs, every_n_train_steps=options.every, save_last=True)
        ],
        logger=False,
        log_every_n_steps=1,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    last = os.path.join(options.runs, "last.ckpt")
    trainer.fit(FineTuning(options.steps), ckpt_path=last if os.path.exists(last) else None)
    if trainer.is_global_zero:
        print(f"step {trainer.global_step}: loss {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
