"""Stage 2 with module=: its parameters and buffers are the same on every rank, as under DDP."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from shardstep import ZeroRedundancyOptimizer
from shardstep._C import Checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("not_saved", torch.randn(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + self.frozen


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 7, generator=generator) * (1 + dist.get_rank())


def same_everywhere(tensors) -> bool:
    for tensor in tensors:
        seen = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(seen, tensor.detach())
        if not all(torch.equal(one, seen[0]) for one in seen):
            return False
    return True


def trains(options):
    rank = dist.get_rank()
    net, plain = Net(rank), DistributedDataParallel(Net(rank))
    trained = list(net.layers.parameters())
    zero = ZeroRedundancyOptimizer(
        trained, torch.optim.SGD, stage=2, sharding="element", module=net, lr=0.1, **options
    )
    optimizer = torch.optim.SGD(plain.module.layers.parameters(), lr=0.1)
    assert same_everywhere([*net.parameters(), *net.buffers()])
    for step in range(4):
        for model, optim in ((net, zero), (plain, optimizer)):
            optim.zero_grad()
            model(batch(step)).square().mean().backward()
            optim.step()
    torch.testing.assert_close(
        [p.detach() for p in net.parameters()],
        [p.detach() for p in plain.parameters()],
        rtol=1e-5,
        atol=1e-6,
    )
    if options.get("broadcast_buffers", True):
        assert same_everywhere(net.buffers())
        if rank == 0:
            theirs = plain.module.buffers()
            torch.testing.assert_close(list(net.buffers()), list(theirs), rtol=1e-5, atol=1e-6)
    else:
        assert not same_everywhere(net.buffers())


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "options", [{}, {"overlap_forward": True}, {"broadcast_buffers": False}], ids=str
)
def test_buffers_become_rank_0s(ranks, options):
    run_ranks(ranks, trains, options)


def one_rank_has_other_buffers():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=dist.get_rank() < 1))
    with pytest.raises(ValueError, match=r"expected the same on every rank.*\(rank"):
        ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, stage=2, module=net, lr=0.1)


def test_modules_that_differ_are_an_error_everywhere():
    run_ranks(2, one_rank_has_other_buffers)


def names_are_used(folder):
    net = Net(0)
    zero = ZeroRedundancyOptimizer(
        net.layers.parameters(), torch.optim.SGD, stage=2, module=net, lr=0.1
    )
    zero.save_checkpoint(folder)
    assert Checkpoint(folder).parameters[1].name == "layers.0.bias"
    net.layers[0].bias.data = net.layers[0].bias.data.double()
    with pytest.raises(ValueError, match=r"expected parameter 1 \(layers.0.bias\) to stay"):
        zero.step()


def test_names_of_the_module_are_in_errors_and_checkpoints(tmp_path):
    run_ranks(2, names_are_used, str(tmp_path / "c"))


def named_parameters_are_named(folder):
    net = Net(0)
    zero = ZeroRedundancyOptimizer(net.layers.named_parameters(), torch.optim.SGD, stage=2, lr=0.1)
    net.layers[0].bias.data = net.layers[0].bias.data.double()
    with pytest.raises(ValueError, match=r"expected parameter 1 \(0.bias\) to stay"):
        zero.step()


def test_names_of_named_parameters_are_in_errors(tmp_path):
    run_ranks(2, named_parameters_are_named, str(tmp_path / "c"))
