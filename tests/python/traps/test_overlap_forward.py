"""Stage 2 with overlap_forward: code that reads or writes a parameter through the module finds it
up to date. Each use comes right after step(), when the parameters may not have arrived yet."""

import copy
import io
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from shardstep import ZeroRedundancyOptimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel

WIDTH = 96
EXCHANGES = ["shared_memory", "pairwise", "native"]


class Model(nn.Module):
    """Parameters held in every way, the embedding's never by a call of its module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.position = nn.Embedding(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.several = nn.ParameterList([torch.randn(WIDTH, WIDTH) / 10 for _ in range(3)])
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH)})
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.hidden = [nn.Linear(WIDTH, WIDTH)]  # no module of this one's

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale + self.position.weight[: x.shape[0]] + self.named["a"]
        for weight in self.several:
            x = torch.tanh(x @ weight)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encode(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = x.unsqueeze(0)
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.hidden[0](x)


def parameters_of(model: Model) -> list[nn.Parameter]:
    return [*model.parameters(), *model.hidden[0].parameters()]


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(6, WIDTH, generator=generator)


class Twins:
    def __init__(self, exchange: str, **options) -> None:
        self.net, self.plain = Model(), Model()
        options = options or {"module": self.net, "overlap_forward": True}
        self.zero = ZeroRedundancyOptimizer(
            parameters_of(self.net),
            torch.optim.SGD,
            stage=2,
            sharding="element",
            exchange=exchange,
            bucket_cap_mb=0.01,
            lr=0.1,
            **options,
        )
        self.ddp = DistributedDataParallel(self.plain)
        self.optimizer = torch.optim.SGD(parameters_of(self.plain), lr=0.1)

    def step(self, number: int) -> None:
        self.zero.zero_grad()
        self.net(batch(number)).square().mean().backward()
        self.optimizer.zero_grad()
        self.ddp(batch(number)).square().mean().backward()
        for p in self.plain.hidden[0].parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        self.optimizer.step()
        self.zero.step()

    def check(self, use) -> None:
        ours = use(self.net)
        theirs = use(self.plain)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def averaged(net):
    average = AveragedModel(net)
    average.update_parameters(net)
    return [p.detach() for p in average.parameters()]


def saved(net):
    file = io.BytesIO()
    torch.save(net.blocks, file)
    file.seek(0)
    blocks = torch.load(file, weights_only=False)
    assert type(blocks[0]._parameters) is dict  # nothing of ours in the file
    return [p.detach() for p in blocks.parameters()]


USES = {
    "a module that is never called": lambda net: net.position.weight[:4].detach(),
    "a parameter held directly": lambda net: net.scale.detach().clone(),
    "a list of parameters": lambda net: [p.detach().clone() for p in net.several],
    "an item of one": lambda net: net.several[2].detach().clone(),
    "a dict of parameters": lambda net: net.named["a"].detach().clone(),
    "another method": lambda net: net.encode(torch.ones(2, WIDTH)).detach(),
    "a call of a submodule": lambda net: net.blocks[1](torch.ones(WIDTH)).detach(),
    "state_dict of a submodule": lambda net: net.blocks[2].state_dict(),
    "state_dict": lambda net: net.state_dict(),
    "parameters": lambda net: [p.detach().clone() for p in net.parameters()],
    "get_parameter": lambda net: net.get_parameter("blocks.0.weight").detach().clone(),
    "an average": averaged,
    "a deep copy": lambda net: copy.deepcopy(net.blocks).state_dict(),
    "a file": saved,
    "forward": lambda net: net(torch.ones(2, WIDTH)).detach(),
    "a copy in another dtype": lambda net: copy.deepcopy(net.blocks).double().state_dict(),
}


def reads(exchange, options):
    twins = Twins(exchange, **options)
    for number, use in enumerate(USES.values()):
        twins.step(number)
        twins.check(use)
        twins.zero.wait()
        twins.check(lambda net: [p.detach() for p in net.parameters()])


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_readers_of_a_parameter_find_it_up_to_date(exchange):
    run_ranks(2, reads, exchange, {})


def the_module_itself(exchange):
    net = Model()
    zero = ZeroRedundancyOptimizer(
        parameters_of(net),
        torch.optim.SGD,
        stage=2,
        sharding="element",
        exchange=exchange,
        overlap_forward=net,
        lr=0.1,
    )
    net(batch(0)).square().mean().backward()
    zero.step()
    early = [p.detach().clone() for p in net.parameters()]
    zero.wait()
    torch.testing.assert_close(early, [p.detach() for p in net.parameters()], rtol=0, atol=0)


@pytest.mark.cpu("it is about shared memory")
def test_a_module_as_overlap_forward():
    run_ranks(2, the_module_itself, "shared_memory")


def loads(exchange):
    twins = Twins(exchange)
    start = copy.deepcopy(twins.net.state_dict())
    twins.step(0)
    twins.net.load_state_dict(start)
    twins.zero.wait()
    for name, value in twins.net.state_dict().items():
        torch.testing.assert_close(value, start[name], rtol=0, atol=0)
    twins.step(1)
    before = twins.net.scale.detach().clone()
    with torch.no_grad():
        twins.net.scale.mul_(2.0)
    twins.zero.wait()
    torch.testing.assert_close(twins.net.scale.detach(), before * 2, rtol=0, atol=0)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_what_is_written_after_the_step_stays(exchange):
    run_ranks(2, loads, exchange)


def is_still_travelling():
    """The other tests would notice if nothing waited: here nothing does."""
    net = nn.Linear(500, 500, bias=False)
    weight = net.weight
    zero = ZeroRedundancyOptimizer(
        net.parameters(),
        torch.optim.SGD,
        stage=2,
        sharding="element",
        exchange="shared_memory",
        module=net,
        overlap_forward=True,
        lr=1.0,
    )
    net(torch.ones(500)).sum().backward()
    old = weight.detach().clone()
    zero.step()
    others = -1 if dist.get_rank() == 0 else 0  # an element of the other rank's
    assert weight.flatten()[others] == old.flatten()[others]
    assert not (net.weight == old).any()


@pytest.mark.cpu("it is about shared memory")
def test_parameters_travel_after_the_step():
    run_ranks(2, is_still_travelling)


def shrink(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data.mul_(0.9)


def shrinks_after_each_step(exchange, register):
    twins = Twins(exchange)
    handles = [register(optimizer, shrink) for optimizer in (twins.zero, twins.optimizer)]
    if register is for_all_optimizers:
        handles.pop().remove()
    for number in range(4):
        twins.step(number)
    for handle in handles:
        handle.remove()
    twins.check(lambda net: [p.detach() for p in parameters_of(net)])


def for_one_optimizer(optimizer, hook):
    return optimizer.register_step_post_hook(hook)


def for_all_optimizers(_, hook):
    return register_optimizer_step_post_hook(hook)


@pytest.mark.parametrize("register", [for_one_optimizer, for_all_optimizers])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_post_hooks_of_the_step_may_change_parameters(exchange, register):
    run_ranks(2, shrinks_after_each_step, exchange, register)


def refuses():
    net = nn.Linear(4, 4)
    for error, options in (
        (ValueError, {"overlap_forward": True}),
        (ValueError, {"overlap_forward": net, "module": nn.Linear(4, 4)}),
        (TypeError, {"module": "net"}),
        (ValueError, {"module": net, "stage": 1}),
    ):
        with pytest.raises(error, match=r"shardstep: expected .*module"):
            ZeroRedundancyOptimizer(
                net.parameters(), torch.optim.SGD, lr=1.0, **{"stage": 2, **options}
            )


def test_refuses_what_does_not_fit():
    begin = time.monotonic()
    run_ranks(2, refuses)
    assert time.monotonic() - begin < 60
