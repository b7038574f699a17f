"""What people's code does to `.grad` between `backward()` and `step()`: in stage 2 it has the
effect that it has under DDP, or it is refused on every rank, and never something else."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from gradient_twins import VARIANTS, Twins
from ranks import run_ranks
from torch import Tensor, nn

# Each gets a parameter that has a gradient.
Idiom = Callable[[nn.Parameter], object]


def set_data(parameter: nn.Parameter) -> None:
    parameter.grad.data = torch.sign(parameter.detach())


def set_data_to_itself(parameter: nn.Parameter) -> None:
    parameter.grad.data = parameter.grad.data


def times_mask(parameter: nn.Parameter) -> None:
    parameter.grad *= (parameter.detach() > 0).to(parameter.dtype)


def add_seeded_noise(parameter: nn.Parameter) -> None:
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(parameter.shape, generator=generator)
    parameter.grad.data += 0.01 * noise.to(parameter.device)


def set_to_itself(parameter: nn.Parameter) -> None:
    parameter.grad = parameter.grad.contiguous().detach().to(parameter.dtype)


HONOURED: dict[str, Idiom] = {
    "p.grad.data = x": set_data,
    "p.grad.data = p.grad.data": set_data_to_itself,
    "p.grad = p.grad.contiguous()": set_to_itself,
    "p.grad *= mask": times_mask,
    "p.grad.data += noise": add_seeded_noise,
    "masked_fill_": lambda p: p.grad.masked_fill_(p.detach() > 0, 0.0),
    "nan_to_num_": lambda p: p.grad.nan_to_num_(0.0),
    "nan_to_num, out=": lambda p: torch.nan_to_num(p.grad, nan=0.0, posinf=1e5, out=p.grad),
    "mul, out=": lambda p: torch.mul(p.grad, 0.5, out=p.grad),
    "clamp, out=": lambda p: torch.clamp(p.grad, -0.01, 0.01, out=p.grad.detach()),
    "clamp_": lambda p: p.grad.data.clamp_(-0.01, 0.01),
    "sign_": lambda p: p.grad.sign_(),
    "copy_": lambda p: p.grad.data.copy_(torch.ones_like(p)),
    "copy_ of a wider view": lambda p: p.grad.copy_(p.grad.double()),
    "fill_": lambda p: p.grad.fill_(0.1),
    "pow_": lambda p: p.grad.pow_(2),
    "zero_": lambda p: p.grad.data.zero_(),
    "lerp_": lambda p: p.grad.lerp_(p.detach(), 0.1),
    "addcmul_": lambda p: p.grad.addcmul_(p.detach(), p.detach(), value=0.1),
    "by its own norm": lambda p: p.grad.detach().div_(1 + p.grad.data.norm(2).item()),
    "by its largest": lambda p: p.grad.div_(1 + p.grad.abs().max()),
    "by its squares": lambda p: p.grad.div_(1 + (p.grad**2).sum().sqrt()),
}


def set_slice(parameter: nn.Parameter) -> None:
    parameter.grad[0] = 0


def set_masked(parameter: nn.Parameter) -> None:
    parameter.grad[parameter.detach() > 0] = 0


def set_data_of_an_alias(parameter: nn.Parameter) -> None:
    parameter.grad.detach().data = torch.zeros_like(parameter)  # no effect under DDP


def set_other_data(parameter: nn.Parameter) -> None:
    parameter.grad.data = torch.zeros(1)


def average_again(parameter: nn.Parameter) -> None:
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def perturb(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=0.05)


def write_elsewhere(parameter: nn.Parameter) -> Tensor:
    return torch.mul(parameter.grad, 2, out=torch.zeros_like(parameter))


REFUSED: dict[str, Idiom] = {
    "p.grad[0] = x": set_slice,
    "p.grad[mask] = x": set_masked,
    "p.grad[0].zero_()": lambda p: p.grad[0].zero_(),
    "p.grad.detach().data = x": set_data_of_an_alias,
    "p.grad.data = another size": set_other_data,
    "all_reduce": average_again,
    "broadcast": lambda p: dist.broadcast(p.grad.data, 0),
    "p += p.grad": perturb,
    "mul, out=another": write_elsewhere,
    "mul of another, out=": lambda p: torch.mul(p.detach(), 2, out=p.grad),
    "set_": lambda p: p.grad.set_(torch.zeros_like(p)),
    "resize_": lambda p: p.grad.resize_(1),
    "view": lambda p: p.grad.view(-1).mul_(0.5),
    "transposed": lambda p: p.grad.transpose(0, -1).mul_(0.5),
    "rounded copy": lambda p: p.grad.copy_(p.grad.bfloat16().float()),
    "norm of a rounded copy": lambda p: p.grad.half().norm(),
    "clone": lambda p: p.grad.clone(),
    "product": lambda p: p.grad * 0.5,
    "comparison": lambda p: (p.grad == 0).all(),
    "means of rows": lambda p: p.grad.mean(dim=-1, keepdim=True) if p.dim() > 1 else p.grad[0],
    "histogram": lambda p: torch.histc(p.grad, 10),
    "median": lambda p: p.grad.abs().median(),
    "flattened": lambda p: torch.cat([p.grad.reshape(-1)]),
    "elements": lambda p: [float(element) for element in p.grad],
    "numpy": lambda p: p.grad.cpu().numpy(),
    "deepcopy": lambda p: copy.deepcopy(p.grad),
    "torch.save": lambda p: torch.save(p.grad, io.BytesIO()),
    "from_dlpack": lambda p: torch.from_dlpack(p.grad),
    "data_ptr": lambda p: p.grad.data_ptr(),
}


def apply(idiom: Idiom, net: nn.Module) -> None:
    for parameter in net.parameters():
        if parameter.grad is not None:
            idiom(parameter)


def honours(options):
    for name, idiom in HONOURED.items():
        twins = Twins(options, torch.optim.SGD, momentum=0.9)
        for step in range(2):
            twins.each(lambda _, optimizer: optimizer.zero_grad())
            twins.backward(step)
            twins.each(lambda net, _, idiom=idiom: apply(idiom, net))
            try:
                twins.step()
            except Exception as error:
                raise AssertionError(name) from error


@pytest.mark.parametrize("options", VARIANTS, ids=lambda o: "-".join(o.values()))
@pytest.mark.parametrize("ranks", [2, 3])
def test_has_the_effect_that_it_has_under_ddp(ranks, options):
    run_ranks(ranks, honours, options)


def refuses(options):
    twins = Twins(options, torch.optim.SGD, momentum=0.9)
    twins.backward(0)
    for name, idiom in REFUSED.items():
        for parameter in (twins.net.first.weight, twins.net.last.bias):
            try:
                idiom(parameter)
            except NotImplementedError as error:
                assert "full_gradient(p)" in str(error), name
            else:
                raise AssertionError(f"{name} was not refused")
    twins.step()  # as if nothing had been tried


@pytest.mark.parametrize("options", VARIANTS, ids=lambda o: "-".join(o.values()))
def test_is_refused_on_every_rank_and_changes_nothing(options):
    run_ranks(2, refuses, options)
