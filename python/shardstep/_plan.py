"""Memory, traffic and time of a training run, before it runs.

Per rank and in bytes, for psi parameters of p bytes and s bytes of state each, on W ranks:

    DDP                      psi (p + p + s)
    ZeRO stage 1             psi (p + p + s / W)
    stage 2                  psi (p + (p + s) / W)  +  gradients on their way
    ... shared parameters    psi (p / ranks per host + (p + s) / W)  +  the same
    ... float32 masters      psi (2 + (4 + 4 + s) / W)  +  the same

Where parameters are not cut, the rank that owns most counts. What a plan cannot know, activations
and the framework itself, the caller adds (`other_bytes`).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardstep._C import default_bucket_cap_mb, partition
from shardstep._elementwise import is_known_elementwise
from shardstep._plan_model import Model, Param, Sizes, StateSize, sizes_of

# What a rank needs to move parts in shared memory: 24 slots for gradients and 4 for parameters.
STAGING_BYTES = (24 + 4) * 512 * 1024
DDP_BUCKET_BYTES = 25 * 1024 * 1024
_MOST_RANKS = 1 << 16
_BACKWARD = 2 / 3  # of the time that forward and backward take


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train, and what it needs."""

    key: str
    name: str
    zero: bool = True  # state is divided among the ranks
    stage2: bool = False
    shares_parameters: bool = False
    masters: bool = False
    ours: bool = True


METHODS = (
    Method("ddp", "DDP", zero=False, ours=False),
    Method("torch_zero", "torch's ZeRO under DDP", ours=False),
    Method("stage1", "stage 1 under DDP"),
    Method("stage2", "stage 2", stage2=True),
    Method("share_parameters", "stage 2, shared parameters", stage2=True, shares_parameters=True),
    Method("masters", "stage 2, bfloat16, float32 masters", stage2=True, masters=True),
)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per rank, on the rank that needs most, at the peak of an iteration."""

    parameters: float
    gradients: float
    state: float
    masters: float
    in_flight: float
    """Gradients that have not been reduced yet, and memory for moving them."""
    other: float
    """What the caller has added, and the module's buffers."""

    @property
    def total(self) -> float:
        return float(sum(dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes per step."""

    gradients_per_rank: float
    parameters_per_rank: float
    gradients_per_host: float
    """Over a host's network link, in each direction; 0 with one host."""
    parameters_per_host: float

    @property
    def per_rank(self) -> float:
        return self.gradients_per_rank + self.parameters_per_rank

    @property
    def per_host(self) -> float:
        return self.gradients_per_host + self.parameters_per_host


@dataclasses.dataclass(frozen=True)
class PlanRow:
    method: Method
    world_size: int
    hosts: int
    memory: Memory
    traffic: Traffic
    seconds: float | None
    """Of an iteration; None without a bandwidth to compute it from."""


@dataclasses.dataclass(frozen=True)
class Links:
    """Bandwidths in bytes per second, and the time of forward and backward in seconds."""

    network: float | None
    host: float | None
    compute: float

    def seconds(self, traffic: Traffic, hosts: int) -> float | None:
        """Reducing gradients overlaps with the backward pass; sending parameters with nothing."""
        bandwidth = self.network if hosts > 1 else self.host
        if bandwidth is None:
            return None
        between = hosts > 1
        reduce = traffic.gradients_per_host if between else traffic.gradients_per_rank
        gather = traffic.parameters_per_host if between else traffic.parameters_per_rank
        backward = self.compute * _BACKWARD
        exposed = max(0.0, reduce / bandwidth - backward) + gather / bandwidth
        return self.compute + exposed


class Plan:
    """What plan() returns: a PlanRow per method and world size, as `rows`; str() is a table."""

    def __init__(self, model: "_Model", world_sizes: Sequence[int], fits: float | None) -> None:
        self._model = model
        self.world_sizes = list(world_sizes)
        self.memory_bytes = fits
        """How much memory each rank has, if the caller said so."""
        self.rows = [
            model.row(method, world_size) for method in METHODS for world_size in world_sizes
        ]

    @property
    def parameters(self) -> int:
        return sum(param.numel for param in self._model.sizes.params)

    @property
    def trainable_parameters(self) -> int:
        return sum(param.numel for param in self._model.sizes.trainable)

    @property
    def ranks_per_host(self) -> int:
        return self._model.ranks_per_host

    @property
    def other_bytes(self) -> float:
        """What the caller has added to each total."""
        return self._model.other_bytes

    def row(self, method: str, world_size: int) -> PlanRow:
        """The row of a method at any world size.

        Methods are "ddp", "torch_zero", "stage1", "stage2", "share_parameters" and "masters". A row
        has `hosts`; `memory` in bytes per rank (`parameters`, `gradients`, `state`, `masters`,
        `in_flight` for gradients on their way, `other`, and their `total`); `traffic` in bytes per
        step (`per_rank`, and `per_host` over each host's link); and `seconds` of an iteration, None
        without a bandwidth.
        """
        keys = {known.key: known for known in METHODS}
        if method not in keys:
            raise ValueError(f"shardstep: expected one of {', '.join(keys)}, got {method!r}")
        return self._model.row(keys[method], _world_size(world_size))

    def smallest_world(self, method: str, memory_bytes: float | None = None) -> int | None:
        """The fewest ranks on which the model fits; None if it does not fit on any number."""
        limit = self.memory_bytes if memory_bytes is None else memory_bytes
        if limit is None:
            raise ValueError("shardstep: expected memory_bytes, here or in plan(), got none")

        def fits(world_size: int) -> bool:
            return self.row(method, world_size).memory.total <= limit

        high = 1
        while not fits(high):
            high *= 2
            if high > _MOST_RANKS:
                return None
        low = high // 2  # does not fit
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high

    def save_png(self, path: Any) -> None:
        """Draws memory per rank. Needs matplotlib."""
        from shardstep._plan_report import draw

        draw(self, path)

    def as_dict(self) -> dict[str, Any]:
        """The same as values that JSON can represent."""
        from shardstep._plan_report import as_dict

        return as_dict(self)

    def __str__(self) -> str:
        from shardstep._plan_report import lines

        return "\n".join(lines(self))


@dataclasses.dataclass
class _Model:
    """The formulas."""

    sizes: Sizes
    state: StateSize
    elementwise: bool
    ranks_per_host: int
    links: Links
    gradient_dtype: torch.dtype | None
    ddp_views: bool
    other_bytes: float

    def row(self, method: Method, world_size: int) -> PlanRow:
        per_host = min(world_size, self.ranks_per_host)
        hosts = math.ceil(world_size / per_host)
        traffic = self._traffic(method, world_size, per_host)
        return PlanRow(
            method,
            world_size,
            hosts,
            self._memory(method, world_size, per_host),
            traffic,
            self.links.seconds(traffic, hosts),
        )

    def _sizes(self, method: Method) -> Sizes:
        return self.sizes.converted(torch.bfloat16) if method.masters else self.sizes

    def _memory(self, method: Method, world_size: int, per_host: int) -> Memory:
        sizes = self._sizes(method)
        params = sizes.trainable
        wide = torch.float32 if method.masters else None
        owned, largest_bucket = self._shares(method, params, world_size)
        if method.zero:
            state = max(
                sum(part * self.state(params[index], wide) for index, part in own) for own in owned
            )
        else:
            state = sum(self.state(param) for param in params)
        gradients: float = sum(param.nbytes for param in params)
        masters = in_flight = 0.0
        if method.masters:
            masters = max(sum(part * 4 * params[i].numel for i, part in own) for own in owned)
        if method.stage2 and world_size > 1:
            summed = [4 * param.numel if wide else param.nbytes for param in params]
            gradients = max(sum(part * summed[i] for i, part in own) for own in owned)
            in_flight = 2 * largest_bucket + STAGING_BYTES  # one is filled, one is sent
        elif not method.stage2 and world_size > 1:
            in_flight = 0 if self.ddp_views else gradients  # DDP's buckets
        return Memory(
            parameters=sum(param.nbytes for param in sizes.params)
            / (per_host if method.shares_parameters else 1),
            gradients=gradients,
            state=state,
            masters=masters,
            in_flight=in_flight,
            other=self.other_bytes + sizes.buffer_bytes,
        )

    def _shares(
        self, method: Method, params: Sequence[Param], world_size: int
    ) -> tuple[list[list[tuple[int, float]]], float]:
        """By rank: the parameters that it owns, and which part of each; the largest bucket."""
        by_element = method.stage2 and self.elementwise
        cap = int(default_bucket_cap_mb(world_size) * 1024 * 1024) if method.stage2 else 0
        if params and params[0].shape is None:  # only the size is known
            return [[(0, 1 / world_size)]], min(cap, params[0].nbytes)
        kinds = {dtype: kind for kind, dtype in enumerate({param.dtype for param in params})}
        owned, buckets = partition(
            "element" if by_element else "parameter",
            world_size,
            cap,
            [(param.numel, param.dtype.itemsize, kinds[param.dtype]) for param in params],
        )
        shares = [
            [(i, count / params[i].numel) for i, count in own if params[i].numel] for own in owned
        ]
        return shares, max(buckets, default=0)

    def _traffic(self, method: Method, world_size: int, per_host: int) -> Traffic:
        """DDP's all-reduce goes round a ring. torch's broadcasts cross a link once per rank, ours
        once per host."""
        params = self._sizes(method).trainable
        total = sum(param.nbytes for param in params)
        others = (world_size - 1) / world_size
        hosts = math.ceil(world_size / per_host)
        other_hosts = (hosts - 1) / hosts
        if method.stage2:
            sent = sum(self._sent_bytes(param) for param in params)
            # Ranks that share parameters send them to other hosts only.
            own = total * (other_hosts / per_host if method.shares_parameters else others)
            # A host of several ranks sends their sum, for masters in float32.
            wide = method.masters and per_host > 1 and self.gradient_dtype is None
            between = sum(4 * param.numel for param in params) if wide else sent
            return Traffic(sent * others, own, between * other_hosts, total * other_hosts)
        ring = 2 * total * others
        copies = per_host if not method.ours else 1
        return Traffic(
            ring,
            total * others if method.zero else 0.0,
            ring if hosts > 1 else 0.0,
            total * other_hosts * copies if method.zero else 0.0,
        )

    def _sent_bytes(self, param: Param) -> float:
        width: float = param.dtype.itemsize
        if self.gradient_dtype is not None and param.dtype.is_floating_point:
            scales = 4 / 256 if self.gradient_dtype == torch.int8 else 0  # one per block
            width = min(width, self.gradient_dtype.itemsize + scales)
        return param.numel * width


def _world_size(value: Any) -> int:
    if not isinstance(value, int) or not 0 < value <= _MOST_RANKS:
        raise ValueError(f"shardstep: expected a world size above 0, got {value!r}")
    return value


def _check_amounts(**amounts: float | None) -> None:
    for name, value in amounts.items():
        may_be_zero = name in ("other_bytes", "compute_seconds")
        if value is not None and not (value > 0 or (may_be_zero and value == 0)):
            least = "0 or more" if may_be_zero else "more than 0"
            raise ValueError(f"shardstep: expected {name} to be {least}, got {value}")


def plan(
    model: Model,
    optimizer_class: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    world_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    ranks_per_host: int = 8,
    memory_bytes: float | None = None,
    dtype: torch.dtype | None = None,
    gradient_dtype: torch.dtype | None = None,
    gradient_as_bucket_view: bool = True,
    other_bytes: float = 0,
    network_bandwidth: float | None = None,
    host_bandwidth: float | None = None,
    compute_seconds: float = 0,
    **defaults: Any,
) -> Plan:
    """Computes memory per rank, traffic and time of DDP, torch's ZeRO and ours, without training.

    Nothing is allocated: the module may be on the meta device. Not collective.

    Args:
        model: a module on any device, a function that makes one (called on the meta device), shapes
            (a list, or a dict by name), or a number of parameters.
        optimizer_class: its state is measured by a step on the meta device.
        world_sizes: how many ranks to plan for.
        ranks_per_host: how many of them share a host, and so its network link.
        memory_bytes: how much memory each rank has, for smallest_world().
        dtype: of the floating-point parameters, if it is not the model's.
        gradient_dtype: what stage 2 sends gradients in.
        gradient_as_bucket_view: DDP's option; without it DDP holds the gradients twice.
        other_bytes: what activations and the framework take per rank; added to each total.
        network_bandwidth: bytes per second of a host's link, for the time of an iteration.
        host_bandwidth: bytes per second between ranks of one host, per rank.
        compute_seconds: how long the forward and backward pass take together.
        defaults: passed to optimizer_class.
    """
    if ranks_per_host < 1:
        raise ValueError(f"shardstep: expected ranks_per_host of 1 or more, got {ranks_per_host}")
    _check_amounts(
        memory_bytes=memory_bytes,
        other_bytes=other_bytes,
        network_bandwidth=network_bandwidth,
        host_bandwidth=host_bandwidth,
        compute_seconds=compute_seconds,
    )
    sizes = sizes_of(model).converted(dtype)
    formulas = _Model(
        sizes,
        StateSize(optimizer_class, defaults),
        is_known_elementwise(optimizer_class),
        ranks_per_host,
        Links(network_bandwidth, host_bandwidth, compute_seconds),
        gradient_dtype,
        gradient_as_bucket_view,
        other_bytes,
    )
    return Plan(formulas, [_world_size(size) for size in world_sizes], memory_bytes)
