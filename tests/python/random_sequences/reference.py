"""The plain optimizer under DDP's semantics, in one process: each rank's gradients are computed
from that rank's batch, and averaged over the ranks in their order."""

import functools
import itertools
from collections.abc import Iterable

import device as devices
import torch
from programs import ALL_EXPERTS, EXPERTS, HOSTS, Backward, Setup
from torch import nn

OPTIMIZERS = {
    # A large epsilon keeps Adam's update smooth where a gradient is all but zero.
    "Adam": (torch.optim.Adam, {"lr": 0.05, "eps": 1e-2}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "eps": 1e-2, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
}


class Net(nn.Module):
    """A trunk, experts of which a batch takes one, none or all, a head, and a late layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(EXPERTS))
        self.late = nn.Linear(5, 5)
        self.last = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, expert: int | None, late: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for number in range(EXPERTS):
            if expert in (number, ALL_EXPERTS):
                x = x + torch.tanh(self.experts[number](x))
        if late:
            x = x + torch.tanh(self.late(x))
        return self.last(x)


def make_net(setup: Setup) -> Net:
    torch.manual_seed(5)
    return Net().to(setup.dtype)


def param_groups(net: Net, setup: Setup, late: bool) -> list[dict]:
    early = [*net.first.parameters(), *net.experts.parameters()]
    last = list(net.last.parameters())
    if setup.groups == 1:
        groups = [{"params": early + last}]
    else:
        groups = [{"params": early}, {"params": last, "lr": 0.02}]
    return groups + [late_group(net)] * late


def late_group(net: Net) -> dict:
    return {"params": list(net.late.parameters()), "lr": 0.03}


def loss_of(net: nn.Module, setup: Setup, batch: Backward, rank: int, late: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * batch.seed + rank)
    rows = 0 if rank in batch.absent else 2
    inputs = torch.randn(rows, 3, generator=generator, dtype=setup.dtype)
    loss = net(inputs, batch.experts[rank], late).square().sum() / 4
    return loss * torch.inf if setup.scaler and batch.overflow == rank else loss


def make_scheduler(setup: Setup, optimizer: torch.optim.Optimizer):
    schedulers = torch.optim.lr_scheduler
    if setup.scheduler == "step":
        return schedulers.StepLR(optimizer, 2, 0.5)
    if setup.scheduler == "one_cycle":
        return schedulers.OneCycleLR(optimizer, 0.1, total_steps=100)
    if setup.scheduler == "lambda":
        return schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return None


def make_scaler(setup: Setup) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler(
        devices.NAME, init_scale=256.0, growth_interval=2, enabled=setup.scaler
    )
    scaler.scale(torch.zeros(()))  # it sets itself up at the first loss
    return scaler


def add_up(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, terms)


class Reference:
    """One model, one optimizer, and what each rank would have accumulated without communication."""

    def __init__(self, setup: Setup, world_size: int) -> None:
        self.setup, self.world_size = setup, world_size
        self.net = make_net(setup)
        self.optimizer_class, self.defaults = OPTIMIZERS[setup.optimizer]
        self.optimizer = self.optimizer_class(param_groups(self.net, setup, False), **self.defaults)
        self.scheduler = make_scheduler(setup, self.optimizer)
        self.scaler = make_scaler(setup)
        self.late = False
        self.unsynced: list[dict[nn.Parameter, torch.Tensor]] = [{} for _ in range(world_size)]

    def trained(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def has_gradients(self) -> bool:
        return any(p.grad is not None for p in self.trained())

    def backward(self, batch: Backward) -> None:
        parameters = [p for p in self.net.parameters() if p.requires_grad]
        for rank, sums in enumerate(self.unsynced):
            if rank in batch.absent and self.setup.mode != "ddp":
                continue  # under DDP it has a batch of no rows: all ranks must take part
            loss = self.scaler.scale(loss_of(self.net, self.setup, batch, rank, self.late))
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
        if batch.sync:
            self._average()

    def _average(self) -> None:
        for parameter in self.net.parameters():
            terms = [
                (rank, sums.pop(parameter))
                for rank, sums in enumerate(self.unsynced)
                if parameter in sums
            ]
            if terms:
                mean = self._sum(terms) / self.world_size
                parameter.grad = mean if parameter.grad is None else parameter.grad + mean

    def _sum(self, terms: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Of some ranks' gradients, rounded where they travel, or the hosts' sums of them."""
        if self.setup.exchange != "hierarchical":
            return add_up(self._as_sent(term) for _, term in terms)
        hosts = HOSTS[self.world_size].split(",")
        sums = [
            add_up(term for _, term in some)
            for _, some in itertools.groupby(terms, key=lambda one: hosts[one[0]])
        ]
        return add_up(map(self._as_sent, sums))

    def _as_sent(self, term: torch.Tensor) -> torch.Tensor:
        narrow = self.setup.gradient_dtype if self.setup.mode == "stage2" else None
        return term if narrow is None or self.world_size == 1 else term.to(narrow).to(term.dtype)

    def zero_grad(self, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none)
        for sums in self.unsynced:
            if set_to_none:
                sums.clear()
            for gradient in sums.values():
                gradient.zero_()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def add_group(self) -> None:
        self.late = True
        self.optimizer.add_param_group(late_group(self.net))
