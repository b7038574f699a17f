"""Random programs: how an optimizer is set up, and what a training script then does with it.

The player skips an operation that makes no sense at its position (a step with a scaler before any
backward pass), so every list of operations is a program, and failing ones shrink well.
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

MOST_RANKS = 3
EXPERTS = 2
ALL_EXPERTS = EXPERTS
# Where the ranks are if the exchange is hierarchical: sums per host, then over hosts, are then
# taken in the order of ranks, as the reference's are.
HOSTS = {1: "a", 2: "a,b", 3: "a,a,b"}
PARTS = ("first", "experts.0", "experts.1", "last.bias", "late")


@dataclass(frozen=True)
class Setup:
    """How both sides are set up; `mode` says who averages the gradients of stage 1."""

    mode: str  # "handed": the test; "ddp": torch's DDP; "stage2": our optimizer
    optimizer: str
    dtype: torch.dtype
    sharding: str
    exchange: str
    bucket_cap_mb: float | None
    flat: bool
    groups: int
    scaler: bool
    scheduler: str | None
    overlap_forward: bool
    # The following in stage 2 only.
    share_parameters: bool  # where the exchange can
    with_module: bool  # whose buffers follow rank 0's
    gradient_dtype: torch.dtype | None


@dataclass(frozen=True)
class Backward:
    """A pass over each rank's own batch, which may take another expert there or none."""

    seed: int
    experts: tuple[int | None, ...]
    absent: frozenset[int]  # ranks without a batch
    sync: bool = True
    overflow: int | None = None  # the rank whose loss is infinite; with a scaler only


@dataclass(frozen=True)
class Step:
    pass


@dataclass(frozen=True)
class ClosureStep:
    batch: Backward


@dataclass(frozen=True)
class ZeroGrad:
    set_to_none: bool
    by: str = "optimizer"  # or "module"


@dataclass(frozen=True)
class ClipNorm:
    by: str  # "torch": torch.nn.utils', "ours": the optimizer's, which only stage 2 has
    max_norm: float
    norm_type: float


@dataclass(frozen=True)
class ClipValue:
    by: str
    value: float


@dataclass(frozen=True)
class Scale:
    """The gradients of a part of the model, in place."""

    part: str
    factor: float  # a power of two, so that sums stay equal to the bit


@dataclass(frozen=True)
class Drop:
    """`.grad` of a part of the model becomes None, so that the next step leaves it out."""

    part: str


@dataclass(frozen=True)
class Unscale:
    pass


@dataclass(frozen=True)
class Schedule:
    pass


@dataclass(frozen=True)
class Freeze:
    part: str
    frozen: bool


@dataclass(frozen=True)
class AddGroup:
    pass


@dataclass(frozen=True)
class Broken:
    """A pass that throws on one rank; all of them hear of it and forget their gradients."""

    batch: Backward
    rank: int
    where: str  # "forward", "backward"


@dataclass(frozen=True)
class Consolidate:
    to: int


@dataclass(frozen=True)
class Copy:
    """The model is copied; the optimizer refuses to be."""


@dataclass(frozen=True)
class Reload:
    """The optimizer loads its own state."""


@dataclass(frozen=True)
class Resume:
    """A new model and optimizer continue with the state of the old ones."""

    by: str  # "state_dict", "checkpoint", "background checkpoint"
    sharding: str


@dataclass(frozen=True)
class Uneven:
    """A loop in Join's context with so many batches on each rank."""

    seed: int
    counts: tuple[int, ...]
    # The following in stage 2 only.
    forget: ZeroGrad | None
    clip: float | None


@dataclass(frozen=True)
class Program:
    setup: Setup
    operations: tuple

    def __repr__(self) -> str:
        lines = [repr(self.setup), *(f"  {operation!r}" for operation in self.operations)]
        return "\n".join(lines)


_seeds = st.integers(0, 99)
_expert = st.none() | st.integers(0, ALL_EXPERTS)


def _backward(sync):
    return st.builds(
        Backward,
        seed=_seeds,
        experts=st.tuples(*[_expert] * MOST_RANKS),
        absent=st.just(frozenset()) | st.sets(st.integers(0, MOST_RANKS - 1)).map(frozenset),
        sync=sync,
        overflow=st.none() | st.none() | st.integers(0, MOST_RANKS - 1),
    )


_trained = _backward(st.just(True))
_by = st.sampled_from(["torch", "ours"])
_zero_grad = st.builds(
    ZeroGrad, st.just(True) | st.booleans(), st.sampled_from(["optimizer", "optimizer", "module"])
)
_operations = st.one_of(
    st.none(),  # what an operation shrinks to
    # What every script does comes up most.
    _trained,
    _trained,
    _trained,
    st.builds(Step),
    st.builds(Step),
    st.builds(Step),
    _zero_grad,
    _zero_grad,
    _backward(st.just(False)),
    st.builds(ClosureStep, _trained),
    st.builds(
        ClipNorm,
        by=_by,
        max_norm=st.sampled_from([0.01, 0.5, 100.0]),
        norm_type=st.sampled_from([2.0, 2.0, 1.0, float("inf")]),
    ),
    st.builds(ClipValue, by=_by, value=st.sampled_from([0.01, 0.3])),
    st.builds(Unscale),
    st.builds(Schedule),
    st.builds(Freeze, st.sampled_from(PARTS), st.booleans()),
    st.builds(Scale, st.sampled_from(PARTS), st.sampled_from([0.5, -2.0])),
    st.builds(Drop, st.sampled_from(PARTS)),
    st.builds(AddGroup),
    st.builds(
        Broken,
        batch=_trained,
        rank=st.integers(0, MOST_RANKS - 1),
        where=st.sampled_from(["forward", "backward"]),
    ),
    st.builds(Consolidate, st.integers(0, MOST_RANKS - 1)),
    st.builds(Copy),
    st.builds(Reload),
    st.builds(
        Resume,
        by=st.sampled_from(["state_dict", "checkpoint", "background checkpoint"]),
        sharding=st.sampled_from(["parameter", "element"]),
    ),
    st.builds(
        Uneven,
        seed=_seeds,
        counts=st.tuples(*[st.integers(0, 3)] * MOST_RANKS),
        forget=st.none() | _zero_grad,
        clip=st.none() | st.sampled_from([0.01, 0.3]),
    ),
)


def setups(mode: str):
    return st.builds(
        Setup,
        mode=st.just(mode),
        optimizer=st.sampled_from(["Adam", "AdamW", "SGD"]),
        dtype=st.sampled_from([torch.float32, torch.float64]),
        sharding=st.sampled_from(["parameter", "element"]),
        exchange=st.sampled_from(["auto", "native", "pairwise", "shared_memory", "hierarchical"]),
        bucket_cap_mb=st.sampled_from([None, 0, 1e-4]),
        flat=st.booleans(),
        groups=st.integers(1, 2),
        scaler=st.booleans(),
        scheduler=st.sampled_from([None, "step", "one_cycle", "lambda"]),
        overlap_forward=st.booleans(),
        share_parameters=st.booleans(),
        with_module=st.booleans(),
        gradient_dtype=st.sampled_from([None, None, torch.bfloat16]),
    )


def programs(mode: str):
    operations = st.lists(_operations, min_size=8, max_size=20).map(
        lambda all_of_them: tuple(one for one in all_of_them if one is not None)
    )
    return st.builds(Program, setups(mode), operations)
