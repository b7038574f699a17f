"""A model with hidden matrices, an embedding and an output layer."""

import shardstep
import torch
from shardstep import ZeroRedundancyOptimizer  # noqa: F401

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(32, 16),
    torch.nn.Linear(16, 64),
    torch.nn.Tanh(),
    torch.nn.Linear(64, 16),
    torch.nn.LayerNorm(16),
    torch.nn.Linear(16, 32),
)
tokens = torch.randint(32, (4, 8))
assert shardstep.muon_groups(model)
