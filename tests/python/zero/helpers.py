"""What the tests of ZeroRedundancyOptimizer share.

A test marked `on_ranks` is a function that runs on every rank of a Gloo group. Unless DDP is used,
gradients are drawn from a seed, the same on each rank, so a plain optimizer gives the expected
result, bit for bit.
"""

import contextlib
import importlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from implementation import ZeroRedundancyOptimizer
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ours = pytest.mark.ours
ELEMENT = pytest.param({"sharding": "element"}, marks=ours, id="element")
BY_PARAMETER = pytest.param({}, id="parameter")
every_sharding = pytest.mark.parametrize("options", [BY_PARAMETER, ELEMENT])
every_layout = pytest.mark.parametrize(
    "options",
    [
        BY_PARAMETER,
        pytest.param({"parameters_as_bucket_view": True}, id="parameter-view"),
        ELEMENT,
        pytest.param(
            {"sharding": "element", "parameters_as_bucket_view": True},
            marks=ours,
            id="element-view",
        ),
    ],
)


def said_elementwise(options: dict[str, Any]) -> dict[str, Any]:
    """For an optimizer that is not known to be element-wise."""
    return {**options, "elementwise": True} if options.get("sharding") == "element" else options


def on_ranks(*world_sizes: int, timeout: float = 60.0) -> Callable:
    """Makes a test run on every rank of groups of these sizes; its arguments are pickled."""

    def decorate(body: Callable) -> Callable:
        def test(world_size: int, **arguments: Any) -> None:
            name = (body.__module__, body.__qualname__)
            run_ranks(world_size, _run_body, *name, arguments, timeout=timeout)

        size = inspect.Parameter("world_size", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        wanted = inspect.signature(body).parameters.values()
        test.__signature__ = inspect.Signature([size, *wanted])
        test.__name__ = body.__name__
        test.__module__ = body.__module__
        test.__doc__ = body.__doc__
        test.body = body
        test.pytestmark = getattr(body, "pytestmark", [])
        return pytest.mark.parametrize("world_size", world_sizes)(test)

    return decorate


def _run_body(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).body(**arguments)


# Parameters and gradients


def make_parameters(*shapes: int | Sequence[int], seed: int = 1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
        for shape in ((s,) if isinstance(s, int) else tuple(s) for s in shapes)
    ]


def sparse_parameter() -> torch.Tensor:
    """On the CPU whatever the tests' device is: sim has no sparse tensors."""
    return torch.eye(3, device="cpu").to_sparse().requires_grad_()


def copies(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone(), p.requires_grad) for p in parameters]


def set_gradients(parameters: Iterable[nn.Parameter], seed: int) -> None:
    """Gives trainable parameters the seed's gradients; the others draw too, so order is all."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = gradient if parameter.requires_grad else None


def groups_over(parameters: Sequence[nn.Parameter], groups: Iterable[dict]) -> list[dict]:
    """Each group takes as many of the parameters as its "count" says."""
    rest, result = iter(parameters), []
    for group in groups:
        options = {key: value for key, value in group.items() if key != "count"}
        result.append({"params": [next(rest) for _ in range(group["count"])], **options})
    return result


class Twins:
    """The same parameters twice: under ZeroRedundancyOptimizer, and under the plain optimizer."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.Adam,
        parameters: Sequence[nn.Parameter] | None = None,
        *,
        groups: Iterable[dict] | None = None,
        options: dict[str, Any] | None = None,
        **defaults: Any,
    ) -> None:
        self.sharded = make_parameters(9, (3, 5), 7, (2, 2)) if parameters is None else parameters
        self.unsharded = copies(self.sharded)
        defaults = {"lr": 0.1, **defaults}

        def grouped(parameters):
            return parameters if groups is None else groups_over(parameters, groups)

        self.plain = optimizer_class(grouped(self.unsharded), **defaults)
        self.zero = ZeroRedundancyOptimizer(
            grouped(self.sharded), optimizer_class, **(options or {}), **defaults
        )

    def set_gradients(self, seed: int) -> None:
        set_gradients(self.sharded, seed)
        set_gradients(self.unsharded, seed)

    def step(self, steps: int = 1, seed: int = 0) -> None:
        """Steps both, and checks that they agree after each."""
        for number in range(steps):
            self.set_gradients(100 * seed + number)
            self.plain.step()
            self.zero.step()
            self.check()

    def check(self) -> None:
        assert_bitwise(self.sharded, self.unsharded)


def consolidated(zero, to: int = 0) -> dict[str, Any] | None:
    """The whole state on the group's rank `to`, None elsewhere."""
    zero.consolidate_state_dict(to=to)
    return zero.state_dict() if zero.rank == to else None


def everywhere(zero) -> dict[str, Any]:
    """The whole state, on every rank."""
    states = [consolidated(zero, rank) for rank in range(zero.world_size)]
    return states[zero.rank]


def state_elements(zero, key: str) -> int:
    """How many elements of the named state this rank keeps."""
    return sum(state[key].numel() for state in zero.optim.state.values())


# Comparing


def assert_bitwise(actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    actual, expected = list(actual), list(expected)
    assert len(actual) == len(expected) > 0
    for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(
            left.detach(),
            right.detach(),
            rtol=0,
            atol=0,
            equal_nan=True,
            check_device=False,  # a tensor of another rank is on another device
            msg=lambda text, index=index: f"tensor {index}: {text}",
        )


def assert_same(actual: Any, expected: Any, path: str = "it") -> None:
    """Equal in type, keys and shape, and bit for bit; consolidated state is on the CPU."""
    assert type(actual) is type(expected), f"{path}: {type(actual)}, not {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype, f"{path}: {actual.dtype}, not {expected.dtype}"
        assert actual.shape == expected.shape, f"{path}: {actual.shape}, not {expected.shape}"
        assert torch.equal(actual.cpu(), expected.cpu()), f"{path}: {actual}, not {expected}"
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), f"{path}: {list(actual)}, not {list(expected)}"
        for key in expected:
            assert_same(actual[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), f"{path}: {len(actual)}, not {len(expected)}"
        for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
            assert_same(left, right, f"{path}[{index}]")
    else:
        assert actual == expected, f"{path}: {actual!r}, not {expected!r}"


def assert_same_on_all_ranks(tensors: Iterable[torch.Tensor], group=None) -> None:
    for tensor in tensors:
        seen = [torch.empty_like(tensor.data) for _ in range(dist.get_world_size(group))]
        dist.all_gather(seen, tensor.data.contiguous(), group=group)
        assert_bitwise(seen, [tensor] * len(seen))


def gathered(value: Any) -> list[Any]:
    """The value of each rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class _Collect(logging.Handler):
    def __init__(self, texts: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Collects what is warned of, by logging or by the warnings module."""
    texts: list[str] = []
    handler = _Collect(texts)
    named = logging.root.manager.loggerDict.values()
    ends = [log for log in named if isinstance(log, logging.Logger) and not log.propagate]
    loggers = [logging.root, *ends]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield texts
        texts += [str(warning.message) for warning in caught]
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


# Training under DDP


class Net(nn.Module):
    """Three layers, odd sizes; `unused` takes no part in forward."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 7), nn.Tanh(), nn.Linear(7, 3)
        )
        if unused:
            self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def make_net(seed: int = 3, **arguments: Any) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(**arguments)


def batches(count: int, seed: int = 0) -> list[torch.Tensor]:
    """This rank's inputs."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return [torch.randn(4, 5, generator=generator) for _ in range(count)]


def ddp_net(seed: int = 3, unused: bool = False, **options: Any) -> DistributedDataParallel:
    """The net with a few parameters per bucket; before DDP rebuilds them there is one for all."""
    options = {"bucket_cap_mb": 3e-4} | options
    return DistributedDataParallel(make_net(seed, unused=unused), **options)


def backward(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().sum()
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer, batch: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = backward(model, batch)
    optimizer.step()
    return loss
