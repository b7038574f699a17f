"""From readings to tables, a plot and a verdict on the goals."""

import dataclasses
import math
import statistics
from collections.abc import Callable
from pathlib import Path

from contest import BASE, FLOOR, GOALS, Case, Row
from table import Summary, Table, draw_iterations  # the folder above is on the path

from launch import Readings

Turns = list[dict[str, Readings]]  # by the names of the rows that took part


@dataclasses.dataclass
class Record:
    """What was measured of a case."""

    turns: Turns = dataclasses.field(default_factory=list)
    pss: dict[str, float] = dataclasses.field(default_factory=dict)  # by row


LOSS_TOLERANCE = 1e-3  # relative: sums in other orders, fused and plain kernels


def speed(turns: Turns, row: str, base: str) -> float:
    """How many times as fast as base: the median of each turn's ratio."""
    ratios = [
        turn[base]["iteration"] / turn[row]["iteration"]
        for turn in turns
        if row in turn and base in turn
    ]
    return statistics.median(ratios) if ratios else float("nan")


def summarize(record: Record, row: str) -> Summary:
    readings = [turn[row] for turn in record.turns if row in turn]
    keys = ("iteration", "step", "cpu", "sent", "link")
    summary = {key: statistics.median(one[key] for one in readings) for key in keys}
    summary["pss"] = record.pss.get(row, float("nan"))
    summary["loss"] = readings[-1]["loss"]
    summary["speed"] = speed(record.turns, row, BASE.name)
    return summary


def tabulate(record: Record, rows: list[Row]) -> Table:
    ran = [row.name for row in rows if any(row.name in turn for turn in record.turns)]
    return {row: summarize(record, row) for row in ran}


def odd_losses(turns: Turns) -> list[str]:
    """The rows that had another loss than those they took turns with."""
    odd = {
        row
        for turn in turns
        for row, readings in turn.items()
        if BASE.name in turn and row != FLOOR.name
        if not abs(readings["loss"] / turn[BASE.name]["loss"] - 1) <= LOSS_TOLERANCE
    }
    return sorted(odd)


def known(form: str, value: float) -> str:
    return "-" if math.isnan(value) else form.format(value)


COLUMNS: dict[str, Callable[[Summary], str]] = {
    "iteration, ms": lambda s: f"{s['iteration']:.0f}",
    f"x {BASE.name}": lambda s: known("{:.2f}x", s["speed"]),
    "step, ms": lambda s: f"{s['step']:.0f}",
    "CPU, ms": lambda s: f"{s['cpu']:.0f}",
    "PSS, MB": lambda s: known("{:.0f}", s["pss"] / 1e6),
    "sent, MB": lambda s: f"{s['sent'] / 1e6:.0f}",
    "link, MB": lambda s: f"{s['link'] / 1e6:.0f}",
    "loss": lambda s: f"{s['loss']:.6g}",
}


def goals(records: dict[Case, Record], tables: dict[Case, Table]) -> str:
    """Every goal whose rows ran; empty when none did."""
    head = ["| goal | against | where | asked | measured | |", "|---|---|---|---|---|---|"]
    lines = []
    for goal in GOALS:
        for case, table in tables.items():
            names = (goal.row.name, goal.base.name)
            if case.place != goal.place or (goal.ranks and case.ranks not in goal.ranks):
                continue
            if not all(name in table for name in names):
                continue
            if goal.times is not None:
                measured, asked = speed(records[case].turns, *names), goal.times
                what, met = "as fast", measured >= asked
            elif goal.link is not None:
                hosts = case.hosts.count
                least = 2 * case.model_bytes() * (hosts - 1) / hosts
                measured, asked = table[names[0]]["link"] / least, goal.link
                what, met = "the least bytes", measured <= asked
            elif names[0] not in records[case].pss or names[1] not in records[case].pss:
                continue  # a trial does not read memory
            else:
                measured, asked = table[names[0]]["pss"] / table[names[1]]["pss"], goal.memory
                what, met = "memory", measured <= asked
            lines.append(
                f"| {goal.what} | {'-' if goal.link else goal.base.name} "
                f"| {case} | {asked:.2f}x {what} "
                f"| {measured:.2f}x | {'met' if met else 'missed'} |"
            )
    return "\n".join(head + lines) if lines else ""


def plot(tables: dict[Case, Table], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    heights = [1 + len(table) for table in tables.values()]
    figure, axes = pyplot.subplots(
        *(len(tables), 2),
        figsize=(11, 0.5 + 0.32 * sum(heights)),
        squeeze=False,
        layout="constrained",
        sharey="row",
        height_ratios=heights,
    )
    for (left, right), (case, table) in zip(axes, tables.items(), strict=True):
        rows = draw_iterations(left, str(case), table)
        if FLOOR.name in table:
            left.axvline(table[FLOOR.name]["iteration"], color="black", linewidth=0.8, ls=":")
        right.barh(rows, [table[row]["pss"] / 1e6 for row in rows], color="tab:orange")
        right.set_xlabel("memory per rank (PSS), MB")
    axes[0][0].legend(fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
