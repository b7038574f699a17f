"""What optimizers of the tests have in common."""

import torch


class SimpleOptimizer(torch.optim.Optimizer):
    """Calls `update` for each parameter with a gradient."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, self.state, group["lr"])

    def update(self, p, state, lr):
        raise NotImplementedError
