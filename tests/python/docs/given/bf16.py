"""The same in bfloat16."""

import shardstep  # noqa: F401
import torch
import torch.distributed as dist  # noqa: F401
from shardstep import ZeroRedundancyOptimizer  # noqa: F401
from torch.nn.parallel import DistributedDataParallel  # noqa: F401

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
batches = [(torch.randn(16, 8), torch.randn(16, 1)) for _ in range(3)]
loss_function = torch.nn.functional.mse_loss
model = model.bfloat16()
batches = [(inputs.bfloat16(), targets.bfloat16()) for inputs, targets in batches]
