"""State whose dtype is not the parameter's."""

import pytest
import torch
from helpers import on_ranks
from shardstep import ZeroRedundancyOptimizer
from torch import nn


class WideMomentum(torch.optim.SGD):
    """Keeps a float32 moment of whatever it trains."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                moment = state.setdefault("wide", torch.zeros_like(p, dtype=torch.float32))
                moment.mul_(0.9).add_(p.grad.float())
                p.add_(moment.to(p.dtype), alpha=-group["lr"])

    def load_state_dict(self, state_dict):
        """torch's own casts state to the parameter's dtype; this class wants it as it comes."""
        super().load_state_dict(state_dict)
        params = [p for group in self.param_groups for p in group["params"]]
        for position, values in state_dict["state"].items():
            self.state[params[position]]["wide"] = values["wide"]


@on_ranks(1, 2)
def test_state_reaches_the_local_optimizer_in_its_own_dtype():
    param = nn.Parameter(torch.zeros(100, dtype=torch.bfloat16))
    zero = ZeroRedundancyOptimizer([param], WideMomentum, lr=0.1)
    param.grad = torch.ones_like(param)
    zero.step()
    moment = torch.rand(100, generator=torch.Generator().manual_seed(0))
    zero.load_state_dict(
        {"state": {0: {"wide": moment}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    )
    whole = zero.consolidate_state_dict(0)
    if whole is not None:
        assert whole["state"][0]["wide"].dtype == torch.float32
        torch.testing.assert_close(whole["state"][0]["wide"], moment.cpu(), rtol=0, atol=0)


@pytest.mark.parametrize("sharding", ["parameter", "element"])
@on_ranks(1, 2)
def test_torchs_optimizers_cast_as_they_do_without_us(sharding):
    sharded = nn.Parameter(torch.zeros(100, dtype=torch.bfloat16))
    unsharded = nn.Parameter(torch.zeros(100, dtype=torch.bfloat16))
    zero = ZeroRedundancyOptimizer([sharded], torch.optim.Adam, lr=0.1, sharding=sharding)
    plain = torch.optim.Adam([unsharded], lr=0.1)
    for param, optimizer in ((sharded, zero), (unsharded, plain)):
        param.grad = torch.ones_like(param)
        optimizer.step()
    state = plain.state_dict()
    state["state"][0]["exp_avg"] = torch.rand(100, generator=torch.Generator().manual_seed(0))
    plain.load_state_dict(state)
    zero.load_state_dict(state)
    whole = zero.consolidate_state_dict(0)
    if whole is not None:
        expected = plain.state_dict()["state"][0]["exp_avg"]
        assert whole["state"][0]["exp_avg"].dtype == expected.dtype
        torch.testing.assert_close(whole["state"][0]["exp_avg"], expected.cpu(), rtol=0, atol=0)
