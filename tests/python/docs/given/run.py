"""Fills the folder with checkpoints, run and runs/1, and with train.py and mymodels.py."""

import tempfile
from pathlib import Path

import shardstep
import torch
import torch.distributed as dist

model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
with tempfile.TemporaryDirectory() as folder:
    store = dist.FileStore(f"{folder}/store", 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    optimizer = shardstep.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, stage=2, sharding="element", lr=1e-3
    )
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.save_checkpoint("run", module=model, extra={"step": 1})
    optimizer.save_checkpoint("runs/{step}", module=model, extra={"step": 1})
    dist.destroy_process_group()
Path("mymodels.py").write_text(
    "import torch\n\n\ndef Net():\n    return torch.nn.Linear(1000, 1000)\n"
)
Path("train.py").write_text(
    "import torch.distributed as dist\n\ndist.init_process_group('gloo')\n"
    "print(f'rank {dist.get_rank()} of {dist.get_world_size()}', flush=True)\n"
    "dist.destroy_process_group()\n"
)
