"""A plan as a table, as JSON and as a picture."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from shardstep._plan import METHODS, Method, Plan, PlanRow
from shardstep._text import size, table

GIB = 1 << 30


def _count(number: float) -> str:
    for unit, scale in (("billion", 1e9), ("million", 1e6), ("thousand", 1e3)):
        if number >= scale:
            return f"{number / scale:.4g} {unit}"
    return f"{number:.0f}"


def _gib(count: float) -> str:
    gib = count / GIB
    return f"{gib:.0f}" if gib >= 100 else f"{gib:.1f}" if gib >= 10 else f"{gib:.3g}"


def _by_world(plan: Plan, title: str, show: Any) -> Iterator[str]:
    rows = []
    for method in METHODS:
        cells = [show(row) for row in plan.rows if row.method == method]
        rows.append((method.name, *cells))
    header = (title, *(str(size) for size in plan.world_sizes))
    yield from table(header, rows, right=set(range(1, len(header))))


def _time(row: PlanRow) -> str:
    return "-" if row.seconds is None else f"{row.seconds * 1e3:.0f}"


def _answer(plan: Plan, method: Method) -> str:
    ranks = plan.smallest_world(method.key)
    return "no number of ranks" if ranks is None else f"{ranks} rank" + "s" * (ranks != 1)


def lines(plan: Plan) -> Iterator[str]:
    yield f"{_count(plan.parameters)} parameters, {_count(plan.trainable_parameters)} trainable"
    yield ""
    yield from _by_world(
        plan, "memory per rank in GiB, by number of ranks", lambda row: _gib(row.memory.total)
    )
    yield ""
    yield from _by_world(plan, "sent by each rank per step", lambda row: size(row.traffic.per_rank))
    if any(row.hosts > 1 for row in plan.rows):
        yield ""
        yield from _by_world(
            plan, "over each host's network link per step", lambda r: size(r.traffic.per_host)
        )
    if any(row.seconds is not None for row in plan.rows):
        yield ""
        yield from _by_world(plan, "estimated milliseconds per iteration", _time)
    if plan.memory_bytes is not None:
        yield ""
        answers = [(method.name, _answer(plan, method)) for method in METHODS]
        yield from table((f"fits into {_gib(plan.memory_bytes)} GiB on", ""), answers, right=set())
    yield ""
    yield f"on the rank that needs most, with up to {plan.ranks_per_host} ranks per host"
    if plan.other_bytes == 0:
        yield "activations are not included: add yours with --other-gib (other_bytes)"


def as_dict(plan: Plan) -> dict[str, Any]:
    result: dict[str, Any] = {
        "parameters": plan.parameters,
        "trainable_parameters": plan.trainable_parameters,
        "rows": [
            {
                "method": row.method.key,
                "world_size": row.world_size,
                "hosts": row.hosts,
                "memory": {**dataclasses.asdict(row.memory), "total": row.memory.total},
                "traffic": dataclasses.asdict(row.traffic),
                "seconds": row.seconds,
            }
            for row in plan.rows
        ],
    }
    if plan.memory_bytes is not None:
        result["smallest_world"] = {
            method.key: plan.smallest_world(method.key) for method in METHODS
        }
    return result


# Parts of a bar, from the bottom: fields of Memory, how the legend calls them, and colours that
# differ in brightness too.
_PARTS = (
    ("parameters", "parameters", "#26547c"),
    ("masters", "float32 masters", "#5c80bc"),
    ("gradients", "gradients", "#ef476f"),
    ("state", "optimizer state", "#ffd166"),
    ("in_flight", "gradients on their way", "#f29cb2"),
    ("other", "other", "#b8b8b8"),
)


def draw(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Stacked bars: a column per world size, a bar per method."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "shardstep: a picture needs matplotlib; install it with `pip install matplotlib`"
        ) from None
    columns = len(plan.world_sizes)
    width = 3.4 + max(1.6 * columns, 4.0)
    figure = Figure(figsize=(width, 3.8), dpi=120, layout="constrained")
    axes = figure.subplots(1, columns, sharex=True, sharey=True, squeeze=False)[0]
    most = max(row.memory.total for row in plan.rows) / GIB
    for axis, world_size in zip(axes, plan.world_sizes, strict=True):
        rows = [row for row in plan.rows if row.world_size == world_size]
        names = [row.method.name for row in rows]
        left = [0.0] * len(rows)
        for field, label, colour in _PARTS:
            sizes = [getattr(row.memory, field) / GIB for row in rows]
            if any(getattr(row.memory, field) for row in plan.rows):
                axis.barh(names, sizes, 0.7, left, color=colour, label=label)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
        for name, total in zip(names, left, strict=True):
            axis.annotate(
                _gib(total * GIB),
                (total, name),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},  # over the limit
            )
        if plan.memory_bytes is not None:
            limit = f"memory per rank, {_gib(plan.memory_bytes)} GiB"
            axis.axvline(
                plan.memory_bytes / GIB, color="black", linewidth=1, linestyle="--", label=limit
            )
        axis.set_title(f"{world_size} rank" + "s" * (world_size != 1), fontsize=10)
        axis.set_xlim(0, 1.3 * most)  # room for the totals
        axis.tick_params(labelsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0].invert_yaxis()
    figure.suptitle("Memory per rank in GiB", fontsize=11)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"shardstep: cannot write the picture {path}: {error}") from error
