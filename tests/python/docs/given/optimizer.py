"""The same, and an optimizer of stage 2 that has made a step."""

import shardstep  # noqa: F401
import torch
import torch.distributed as dist  # noqa: F401
from shardstep import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel  # noqa: F401

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
batches = [(torch.randn(16, 8), torch.randn(16, 1)) for _ in range(3)]
loss_function = torch.nn.functional.mse_loss
optimizer = ZeroRedundancyOptimizer(
    model.parameters(), torch.optim.AdamW, stage=2, sharding="element", module=model, lr=1e-3
)
inputs, targets = batches[0]
loss_function(model(inputs), targets).backward()
optimizer.step()
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
step = 1
