"""Stage 2 updates in shares: parameters of one travel while the next is updated. Two ranks agree
with the plain optimizer bit for bit."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from shardstep import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

LAYERS, WIDTH = 12, 8
ELEMENTWISE = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"]
ELEMENTWISE += ["NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


def make_model() -> torch.nn.Module:
    torch.manual_seed(4)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def make_zero(model, optimizer_class=torch.optim.Adam, **options):
    options = {"exchange": "pairwise", "sharding": "element", "lr": 1e-2, **options}
    return ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class, stage=2, bucket_cap_mb=0.0003, **options
    )


def train(model, optimizer, steps, first=0) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(5, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()


def assert_same(model, plain) -> None:
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class CountedSteps:
    """Counts the steps of a class of optimizers; one of them may fail."""

    def __init__(self, monkeypatch, optimizer_class, fails_at=None) -> None:
        self.count = 0
        step = optimizer_class.step

        def counted(optimizer, *args, **kwargs):
            self.count += 1
            if self.count == fails_at:
                raise RuntimeError("this share cannot be updated")
            return step(optimizer, *args, **kwargs)

        monkeypatch.setattr(optimizer_class, "step", counted)


def check_as_the_plain_optimizer(exchange, sharding):
    os.environ["SHARDSTEP_TEST_HOSTS"] = "a,b"
    model = make_model()
    for name in ELEMENTWISE:
        optimizer_class = getattr(torch.optim, name)
        ours = copy.deepcopy(model)
        plain = DistributedDataParallel(copy.deepcopy(model))
        zero = make_zero(ours, optimizer_class, exchange=exchange, sharding=sharding)
        train(ours, zero, 4)
        with pytest.MonkeyPatch.context() as monkeypatch:
            steps = CountedSteps(monkeypatch, optimizer_class)
            train(ours, zero, 1, first=4)
            assert 6 <= steps.count <= 8, (name, steps.count, zero.stats()["buckets"])
        train(plain, optimizer_class(plain.parameters(), lr=1e-2), 5)
        assert_same(ours, plain.module)


@pytest.mark.parametrize("sharding", ["element", "parameter"])
@pytest.mark.parametrize("exchange", ["pairwise", "hierarchical"])
def test_as_the_plain_optimizer(exchange, sharding):
    run_ranks(2, check_as_the_plain_optimizer, exchange, sharding)


def check_a_hook_on_one_rank():
    ours, seen = make_model(), []
    plain = DistributedDataParallel(make_model())
    zero = make_zero(ours)
    if dist.get_rank() == 0:
        zero.optim.register_step_post_hook(lambda *_: seen.append(len(seen)))
    train(ours, zero, 3)
    train(plain, torch.optim.Adam(plain.parameters(), lr=1e-2), 3)
    assert_same(ours, plain.module)
    assert len(seen) == (3 if dist.get_rank() == 0 else 0)


def test_a_hook_on_one_rank_sees_whole_steps():
    run_ranks(2, check_a_hook_on_one_rank)


class Momentum(torch.optim.SGD):
    """A user's own: it may keep something per step."""


def check_own_classes_step_once():
    model = make_model()
    zero = make_zero(model, Momentum, elementwise=True)
    with pytest.MonkeyPatch.context() as monkeypatch:
        steps = CountedSteps(monkeypatch, Momentum)
        train(model, zero, 2)
    assert steps.count == 2


def test_a_users_own_class_steps_once():
    run_ranks(2, check_own_classes_step_once)


def check_a_share_that_fails(exchange):
    os.environ["SHARDSTEP_TEST_HOSTS"] = "a,a,b"
    model = make_model()
    zero = make_zero(model, exchange=exchange)
    train(model, zero, 1)
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as monkeypatch:
        CountedSteps(monkeypatch, torch.optim.Adam, fails_at=3 if rank == 1 else None)
        message = "this share cannot be updated"
        with pytest.raises(RuntimeError, match=message if rank == 1 else f"rank 1.*{message}"):
            train(model, zero, 1, first=1)
    train(model, zero, 1, first=2)
    for param in model.parameters():
        others = [torch.empty_like(param) for _ in range(dist.get_world_size())]
        dist.all_gather(others, param.detach())
        assert all(torch.equal(other, param) for other in others)


@pytest.mark.parametrize("exchange", ["pairwise", "hierarchical"])
def test_a_share_that_fails_on_one_rank_is_an_error_on_all(exchange):
    run_ranks(3, check_a_share_that_fails, exchange)
