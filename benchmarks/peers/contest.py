"""Who competes, in which settings."""

import dataclasses
from typing import Any

FUSED = {"fused": True}
OURS = {"ours": True, "ddp": False, "stage": 2, "sharding": "element", **FUSED}


@dataclasses.dataclass(frozen=True)
class Row:
    """A contestant: a maker of worker.py and its options."""

    name: str
    maker: str
    options: dict[str, Any]
    deepspeed: bool = False  # runs in DeepSpeed's environment


FLOOR = Row("compute alone", "compute", {})
DDP_FUSED = Row("DDP, fused Adam", "ddp", FUSED)
TORCH_ZERO_FUSED = Row("torch ZeRO, fused Adam", "zero", {"ours": False, "ddp": True, **FUSED})
FSDP2 = Row("FSDP2, fused Adam", "fsdp2", {})
OURS_STAGE_1 = Row("ours, stage 1, fused Adam", "zero", {"ours": True, "ddp": True, **FUSED})
OURS_SHARED = Row("ours, stage 2, shared memory", "zero", {**OURS, "exchange": "shared_memory"})
OURS_ONE_COPY = Row(
    "ours, stage 2, shared parameters",
    "zero",
    {**OURS, "exchange": "shared_memory", "share_parameters": True},
)
OURS_PAIRWISE = Row("ours, stage 2, pairwise", "zero", {**OURS, "exchange": "pairwise"})
OURS_OVERLAP = Row(
    "ours, stage 2, pairwise, overlap_forward",
    "zero",
    {**OURS, "exchange": "pairwise", "overlap_forward": True},
)
OURS_BF16 = Row(
    "ours, stage 2, pairwise, bfloat16 gradients",
    "zero",
    {**OURS, "exchange": "pairwise", "gradient_dtype": "bfloat16"},
)
OURS_SHARED_BF16 = Row(
    "ours, stage 2, shared memory, bfloat16 gradients",
    "zero",
    {**OURS, "exchange": "shared_memory", "gradient_dtype": "bfloat16"},
)

BASE = TORCH_ZERO_FUSED
ROWS = {
    "compute": FLOOR,
    "ddp": Row("DDP, Adam", "ddp", {}),
    "ddp-fused": DDP_FUSED,
    "zero": Row("torch ZeRO, Adam", "zero", {"ours": False, "ddp": True}),
    "zero-fused": TORCH_ZERO_FUSED,
    "fsdp2": FSDP2,
    "deepspeed-1": Row("DeepSpeed ZeRO-1, fused Adam", "deepspeed", {"stage": 1}, deepspeed=True),
    "deepspeed-2": Row("DeepSpeed ZeRO-2, fused Adam", "deepspeed", {"stage": 2}, deepspeed=True),
    "ours-1": OURS_STAGE_1,
    "ours-shared": OURS_SHARED,
    "ours-one-copy": OURS_ONE_COPY,
    "ours-shared-bf16": OURS_SHARED_BF16,
    "ours-pairwise": OURS_PAIRWISE,
    "ours-overlap": OURS_OVERLAP,
    "ours-bf16": OURS_BF16,
}
# Ranks in two namespaces of one host could share memory, which no two hosts can: only sockets.
LINK_ROWS = ("ddp-fused", "zero-fused", "fsdp2", "ours-pairwise", "ours-overlap", "ours-bf16")


@dataclasses.dataclass(frozen=True)
class Case:
    """A table."""

    ranks: int
    link: bool  # each rank in a network namespace of its own, 1 Gbit/s between them
    rows: tuple[str, ...]
    layers: int

    def __str__(self) -> str:
        where = "1 Gbit/s between them" if self.link else "one host"
        return f"{self.ranks} ranks, {where}"


@dataclasses.dataclass(frozen=True)
class Goal:
    """A ratio that the design asks for: of times, faster is more; of memory, less is less."""

    what: str
    row: Row
    base: Row
    link: bool
    times: float | None = None
    memory: float | None = None
    ranks: tuple[int, ...] = (2, 4)


GOALS = (
    Goal("stage 2, same host", OURS_SHARED, TORCH_ZERO_FUSED, False, times=2.0),
    Goal("stage 2, same host", OURS_SHARED, DDP_FUSED, False, times=1.6),
    Goal("stage 2, sockets", OURS_PAIRWISE, TORCH_ZERO_FUSED, False, times=1.3),
    Goal("stage 2, 1 Gbit/s", OURS_PAIRWISE, TORCH_ZERO_FUSED, True, times=1.9),
    Goal("stage 2, 1 Gbit/s", OURS_PAIRWISE, DDP_FUSED, True, times=1.0),
    Goal("stage 1", OURS_STAGE_1, TORCH_ZERO_FUSED, False, times=1.0, ranks=(2,)),
    Goal("stage 1", OURS_STAGE_1, TORCH_ZERO_FUSED, False, times=1.2, ranks=(4,)),
    Goal("stage 2, same host", OURS_SHARED, DDP_FUSED, False, memory=0.55, ranks=(2,)),
    Goal("stage 2, sockets", OURS_PAIRWISE, DDP_FUSED, False, memory=0.55, ranks=(2,)),
    Goal("shared parameters", OURS_ONE_COPY, DDP_FUSED, False, memory=0.45, ranks=(2,)),
)


def opponents(row: Row, link: bool) -> list[Row]:
    """Whom a row is compared with: they take turns with it."""
    against = [goal.base for goal in GOALS if goal.row == row and goal.link == link]
    known = {base.name: base for base in [BASE, *against]}
    return list(known.values()) if row is not BASE else []
