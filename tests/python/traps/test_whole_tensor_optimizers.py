"""Optimizers that need whole tensors never run on parts of them unless the user allows it."""

import functools

import pytest
import torch
from helpers import Twins, make_parameters, on_ranks
from shardstep import ZeroRedundancyOptimizer
from simple_optimizer import SimpleOptimizer
from torch import nn

EVERY_KNOWN = [
    *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "SGD"),
]


class Lamb(SimpleOptimizer):
    """Scales each update by the norm of its whole parameter."""

    def update(self, p, state, lr):
        p.sub_(lr * p.norm() / p.grad.norm() * p.grad)


class SignSGD(SimpleOptimizer):
    """Element-wise, but not known to be."""

    def update(self, p, state, lr):
        p.sub_(lr * p.grad.sign())


class NormalizedSGD(torch.optim.SGD):
    """A subclass of a known class that is no longer element-wise."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad /= p.grad.norm()
        return super().step(closure)


class AdamLike(torch.optim.Adam):
    """Overrides nothing; a subclass is still its author's."""


class MyLBFGS(torch.optim.LBFGS):
    pass


def make_lamb(params, **options):
    return Lamb(params, **options)


def make_lbfgs(params, **options):
    return torch.optim.LBFGS(params, **options)


UNKNOWN = [
    *(Lamb, SignSGD, NormalizedSGD, AdamLike, functools.partial(Lamb, lr=0.2), make_lamb),
    *(torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam),
]


def name_of(optimizer_class):
    return getattr(optimizer_class, "__name__", "partial")


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("optimizer_class", UNKNOWN, ids=name_of)
@on_ranks(2)
def test_unknown_optimizers_are_refused_by_element(optimizer_class, stage):
    with pytest.raises(ValueError, match=r"element-wise.*elementwise=True"):
        ZeroRedundancyOptimizer(
            make_parameters((4, 4)), optimizer_class, sharding="element", stage=stage
        )


@on_ranks(2)
def test_the_refusal_names_the_class_and_the_rank():
    with pytest.raises(ValueError, match=r"got Lamb.*\(rank \d of 2\)"):
        ZeroRedundancyOptimizer(make_parameters(9), Lamb, sharding="element")


@pytest.mark.parametrize("options", [{}, {"sharding": "element", "elementwise": True}])
@on_ranks(2)
def test_who_says_so_may(options):
    Twins(SignSGD, options=options).step(3)


@pytest.mark.parametrize("optimizer_class", [Lamb, NormalizedSGD, AdamLike], ids=name_of)
@on_ranks(2)
def test_by_parameter_any_optimizer_runs(optimizer_class):
    Twins(optimizer_class).step(2)


@pytest.mark.parametrize("name", EVERY_KNOWN)
@on_ranks(2)
def test_every_known_optimizer_runs_by_element(name):
    optimizer_class = getattr(torch.optim, name)
    Twins(optimizer_class, options={"sharding": "element"}).step(2)


@on_ranks(2)
def test_a_partial_of_a_known_class_is_known():
    partial = functools.partial(functools.partial(torch.optim.AdamW, eps=1e-6), betas=(0.8, 0.9))
    Twins(partial, options={"sharding": "element"}).step(2)


@pytest.mark.parametrize("options", [{}, {"sharding": "element", "elementwise": True}])
@pytest.mark.parametrize(
    "optimizer_class",
    [torch.optim.LBFGS, MyLBFGS, functools.partial(MyLBFGS, lr=0.5), make_lbfgs],
    ids=name_of,
)
@on_ranks(2)
def test_lbfgs_is_refused_everywhere(optimizer_class, options):
    with pytest.raises(ValueError, match="LBFGS"):
        ZeroRedundancyOptimizer([nn.Parameter(torch.ones(3))], optimizer_class, **options)


class Factory:
    """Makes optimizers, and looks different on every rank."""

    def __call__(self, params, **options):
        return SignSGD(params, **options)


@on_ranks(2)
def test_an_object_may_make_the_optimizer():
    Twins(Factory()).step(2)
    with pytest.raises(ValueError, match="got Factory"):
        Twins(Factory(), options={"sharding": "element"})
