"""Trains under Lightning Fabric on 2 CPU processes, which Fabric starts; run by
test_lightning_fabric.py.

  fabric_program.py <folder> <sharding or none>...

Writes for each, to a folder of its name below the folder: half.ckpt, saved by Fabric after 4 steps;
whole.<rank>.pt, the parameters after 8 steps without interruption; resumed.<rank>.pt, the same from
half.ckpt with new objects.
"""

import sys
from pathlib import Path

import torch
from lightning_fabric import Fabric
from shardstep import ZeroRedundancyOptimizer
from torch import nn


def build(fabric, sharding):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3))
    # After the model is set up in DDP: it must be the same on all ranks by then.
    model = fabric.setup_module(model)
    if sharding == "none":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, sharding=sharding, lr=1e-2
        )
    return model, fabric.setup_optimizers(optimizer)


def train(fabric, model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + fabric.global_rank)
        inputs = torch.randn(5, 7, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs[:, :3].sin())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()


def train_save_and_resume(fabric, sharding, folder):
    def write(name, model):
        torch.save(model.state_dict(), folder / f"{name}.{fabric.global_rank}.pt")

    model, optimizer = build(fabric, sharding)
    train(fabric, model, optimizer, range(4))
    # Fabric consolidates a sharded optimizer by itself.
    fabric.save(folder / "half.ckpt", {"model": model, "optimizer": optimizer, "step": 4})
    train(fabric, model, optimizer, range(4, 8))
    write("whole", model)

    model, optimizer = build(fabric, sharding)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(folder / "half.ckpt", state)
    train(fabric, model, optimizer, range(state["step"], 8))
    write("resumed", model)


def main():
    folder, shardings = Path(sys.argv[1]), sys.argv[2:]
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    assert fabric.world_size == 2
    for sharding in shardings:
        (folder / sharding).mkdir(exist_ok=True)
        train_save_and_resume(fabric, sharding, folder / sharding)


if __name__ == "__main__":
    main()
