"""A model, and adamw.pt, a plain optimizer's state."""

import torch

model = torch.nn.Linear(8, 1)
before = torch.optim.AdamW(model.parameters())
model(torch.randn(4, 8)).sum().backward()
before.step()
torch.save(before.state_dict(), "adamw.pt")
