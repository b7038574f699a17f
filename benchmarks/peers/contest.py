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
OURS_PAIRWISE_BY_PARAMETER = Row(
    "ours, stage 2, pairwise, by parameter",
    "zero",
    {**OURS, "exchange": "pairwise", "sharding": "parameter"},
)
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
# Whatever fits the hosts.
OURS_BY_ELEMENT = Row("ours, stage 2, by element", "zero", OURS)
OURS_BY_PARAMETER = Row("ours, stage 2, by parameter", "zero", {**OURS, "sharding": "parameter"})
OURS_8_BITS = Row("ours, stage 2, 8-bit gradients", "zero", {**OURS, "gradient_dtype": "int8"})
OURS_ONE_COPY_PER_HOST = Row(
    "ours, stage 2, one copy per host", "zero", {**OURS, "share_parameters": True}
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
    "ours-pairwise-parameter": OURS_PAIRWISE_BY_PARAMETER,
    "ours-overlap": OURS_OVERLAP,
    "ours-bf16": OURS_BF16,
    "ours-element": OURS_BY_ELEMENT,
    "ours-parameter": OURS_BY_PARAMETER,
    "ours-8-bits": OURS_8_BITS,
    "ours-one-copy-per-host": OURS_ONE_COPY_PER_HOST,
}
ONE_HOST_ROWS = tuple(
    key
    for key, row in ROWS.items()
    if row not in (OURS_BY_ELEMENT, OURS_8_BITS, OURS_ONE_COPY_PER_HOST)
)
LINK_ROWS = (
    *("ddp-fused", "zero-fused", "fsdp2", "ours-element", "ours-parameter"),
    *("ours-one-copy-per-host", "ours-overlap", "ours-bf16", "ours-8-bits"),
)
TINY_ROWS = ("ddp-fused", "zero-fused", "ours-pairwise")


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Made of namespaces; written as 2x1@10: two hosts of one rank each, 10 Gbit/s."""

    count: int
    ranks_each: int
    gbit: float

    @staticmethod
    def parse(text: str) -> "Hosts":
        try:
            shape, gbit = text.split("@") if "@" in text else (text, "1")
            count, ranks_each = (int(number) for number in shape.split("x"))
            hosts = Hosts(count, ranks_each, float(gbit))
        except ValueError:
            raise ValueError(f"expected hosts such as 2x1 or 2x2@10, got {text}") from None
        if hosts.count < 2 or hosts.ranks_each < 1 or hosts.gbit <= 0:
            raise ValueError(f"expected at least two hosts, a rank on each and a rate, got {text}")
        return hosts

    def __str__(self) -> str:
        return f"{self.count}x{self.ranks_each}@{self.gbit:g}"


@dataclasses.dataclass(frozen=True)
class Case:
    """A table."""

    ranks: int
    hosts: Hosts | None  # None: one host
    rows: tuple[str, ...]
    layers: int
    model: str = "linear"

    def model_bytes(self) -> int:
        width = 64 if self.model == "tiny" else 2000
        return 4 * self.layers * (width + 1) * width

    @property
    def place(self) -> str:
        if self.model == "tiny":
            return "tiny"
        return str(self.hosts) if self.hosts else "one host"

    def __str__(self) -> str:
        if self.model == "tiny":
            return f"{self.ranks} ranks, one host, 100 x Linear(64)"
        if self.hosts is None:
            return f"{self.ranks} ranks, one host"
        each = f"{self.hosts.ranks_each} rank{'s' if self.hosts.ranks_each > 1 else ''}"
        return f"{self.hosts.count} hosts of {each}, {self.hosts.gbit:g} Gbit/s"


@dataclasses.dataclass(frozen=True)
class Goal:
    """A ratio that the design asks for: of times, faster is more; of memory, less is less; of bytes
    over a host's link, against the least that it must carry."""

    what: str
    row: Row
    base: Row
    place: str = "one host"
    times: float | None = None
    memory: float | None = None
    link: float | None = None
    ranks: tuple[int, ...] | None = None  # None: any


GOALS = (
    Goal("stage 2, same host", OURS_SHARED, TORCH_ZERO_FUSED, times=2.0),
    Goal("stage 2, same host", OURS_SHARED, DDP_FUSED, times=1.6),
    Goal("stage 2, sockets", OURS_PAIRWISE, TORCH_ZERO_FUSED, times=1.3),
    Goal("stage 2, sockets, by parameter", OURS_PAIRWISE_BY_PARAMETER, TORCH_ZERO_FUSED, times=1.3),
    Goal("100 x Linear(64), sockets", OURS_PAIRWISE, DDP_FUSED, "tiny", times=1.0),
    Goal("stage 2, by element", OURS_BY_ELEMENT, DDP_FUSED, "2x1@1", times=1.05),
    Goal("stage 2, by parameter", OURS_BY_PARAMETER, DDP_FUSED, "2x1@1", times=1.05),
    Goal("stage 2, by element", OURS_BY_ELEMENT, DDP_FUSED, "2x1@10", times=1.2),
    Goal("stage 2, by element", OURS_BY_ELEMENT, DDP_FUSED, "2x2@1", times=1.5),
    Goal("stage 2, by element", OURS_BY_ELEMENT, TORCH_ZERO_FUSED, "2x2@1", times=3.1),
    Goal("stage 2, by parameter", OURS_BY_PARAMETER, DDP_FUSED, "2x2@1", times=1.5),
    Goal("stage 2, by parameter", OURS_BY_PARAMETER, TORCH_ZERO_FUSED, "2x2@1", times=3.1),
    Goal("stage 2, by element", OURS_BY_ELEMENT, DDP_FUSED, "3x2@1", times=1.5),
    Goal("8-bit gradients", OURS_8_BITS, OURS_BY_ELEMENT, "2x1@1", times=1.4),
    *(
        Goal("bytes over a link", row, row, place, link=1.02)
        for place in ("2x1@1", "2x2@1", "3x2@1")
        for row in (OURS_BY_ELEMENT, OURS_BY_PARAMETER)
    ),
    Goal("stage 1", OURS_STAGE_1, TORCH_ZERO_FUSED, times=1.0, ranks=(2,)),
    Goal("stage 1", OURS_STAGE_1, TORCH_ZERO_FUSED, times=1.2, ranks=(4,)),
    Goal("stage 2, same host", OURS_SHARED, DDP_FUSED, memory=0.55, ranks=(2,)),
    Goal("stage 2, sockets", OURS_PAIRWISE, DDP_FUSED, memory=0.55, ranks=(2,)),
    Goal("shared parameters", OURS_ONE_COPY, DDP_FUSED, memory=0.45, ranks=(2,)),
)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A line of the table of hosts in README: rows that take turns in one match."""

    rows: tuple[str, ...]
    hosts: str | None = None
    ranks: int = 2  # on one host
    model: str = "linear"

    def case(self, layers: int) -> Case:
        hosts = Hosts.parse(self.hosts) if self.hosts else None
        ranks = hosts.count * hosts.ranks_each if hosts else self.ranks
        return Case(ranks, hosts, self.rows, 100 if self.model == "tiny" else layers, self.model)


SOCKETS = ("zero-fused", "ours-pairwise", "ours-pairwise-parameter")
TRIALS = {
    "2x2": Trial(("ddp-fused", "zero-fused", "ours-element", "ours-parameter"), "2x2@1"),
    "2x1": Trial(("ddp-fused", "ours-element", "ours-parameter"), "2x1@1"),
    "2x1@10": Trial(("ddp-fused", "ours-element"), "2x1@10"),
    "3x2": Trial(("ddp-fused", "ours-element"), "3x2@1"),
    "8-bits": Trial(("ours-element", "ours-8-bits"), "2x1@1"),
    "tiny": Trial(("ddp-fused", "ours-pairwise"), model="tiny"),
    "sockets-2": Trial(SOCKETS),
    "sockets-4": Trial(SOCKETS, ranks=4),
}


def opponents(row: Row, place: str) -> list[Row]:
    """Whom a row is compared with: they take turns with it."""
    against = [goal.base for goal in GOALS if goal.row == row and goal.place == place]
    known = {base.name: base for base in [BASE, *against]}
    return list(known.values()) if row is not BASE else []
