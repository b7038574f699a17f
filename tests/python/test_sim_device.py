"""The simulated device and its backend, from Python: plain torch trains on them."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def run(function, *args):
    return run_ranks(2, function, *args, device="sim")


def collectives() -> None:
    rank = dist.get_rank()
    assert torch.sim.current_device() == rank
    tensor = torch.full((3,), float(rank + 1))
    assert tensor.device == torch.device("sim", rank)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3.0] * 3
    names = [None, None]
    dist.all_gather_object(names, f"rank {rank}")
    assert names == ["rank 0", "rank 1"]
    dist.barrier()
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(2, device="cpu"))
    calls, size = torch.sim.traffic(dist.group.WORLD)["all_reduce"]
    assert (calls, size) == (1, 12)
    group = dist.new_group([1])
    if rank == 1:
        assert dist.get_global_rank(group, 0) == 1


def test_collectives():
    run(collectives)


def train_ddp(static_graph: bool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))

    model = DistributedDataParallel(make(), static_graph=static_graph)
    plain = make()
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(4):
        inputs = [
            torch.randn(4, 5, generator=torch.Generator().manual_seed(9 * step + r)) for r in (0, 1)
        ]
        model(inputs[dist.get_rank()]).square().mean().backward()
        (sum(plain(x).square().mean() for x in inputs) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("static_graph", [False, True])
def test_torch_ddp(static_graph):
    run(train_ddp, static_graph)


def different_calls() -> None:
    tensor = torch.ones(2 + dist.get_rank())
    with pytest.raises(RuntimeError, match=r"call \d+ \(all_reduce\(sum\) of 2 x Float\)"):
        dist.all_reduce(tensor)


def test_ranks_must_make_the_same_calls():
    run(different_calls)


def memory_and_syncs() -> None:
    before, syncs = torch.sim.memory_allocated(), torch.sim.host_syncs()
    tensor = torch.zeros(1000)
    assert torch.sim.memory_allocated() - before == 4000
    tensor.add_(1).sum().sqrt()
    assert torch.sim.host_syncs() == syncs
    tensor.sum().item()
    assert torch.sim.host_syncs() == syncs + 1


def test_memory_and_syncs_are_counted():
    run(memory_and_syncs)
