"""From readings to tables, a plot and a verdict on the goals."""

import statistics
from collections.abc import Callable
from pathlib import Path

from contest import BASE, FLOOR, GOALS, Case, Row
from launch import Readings

Rounds = list[dict[str, Readings]]  # by row name; a row that failed is missing
Summary = dict[str, float]
Table = dict[str, Summary]

LOSS_TOLERANCE = 1e-3  # relative: sums in other orders, fused and plain kernels


def speed(rounds: Rounds, row: str, base: str) -> float:
    """How many times as fast as base: the median of each round's ratio."""
    middle = statistics.median
    ratios = [
        middle(turn[base]["iteration"]) / middle(turn[row]["iteration"])
        for turn in rounds
        if row in turn and base in turn
    ]
    return middle(ratios) if ratios else float("nan")


def summarize(rounds: Rounds, row: str) -> Summary:
    def values(key: str) -> list[float]:
        return [value for turn in rounds if row in turn for value in turn[row][key]]

    summary = {key: statistics.median(values(key)) for key in ("iteration", "step", "cpu", "sent")}
    summary["pss"] = max(values("pss"))
    summary["loss"] = next(turn for turn in rounds if row in turn)[row]["loss"][-1]
    summary["speed"] = speed(rounds, row, BASE.name)
    return summary


def tabulate(rounds: Rounds, rows: list[Row]) -> Table:
    ran = [row.name for row in rows if any(row.name in turn for turn in rounds)]
    return {row: summarize(rounds, row) for row in ran}


def odd_losses(rounds: Rounds, table: Table) -> list[str]:
    """The rows that trained to another loss than most, in any round."""
    trained = [row for row in table if row != FLOOR.name]
    losses = {row: [t[row]["loss"][-1] for t in rounds if row in t] for row in trained}
    if not losses:
        return []
    usual = statistics.median(value for values in losses.values() for value in values)
    return [
        row
        for row, values in losses.items()
        if any(not abs(value - usual) <= LOSS_TOLERANCE * abs(usual) for value in values)
    ]


COLUMNS: dict[str, Callable[[Summary], str]] = {
    "iteration, ms": lambda s: f"{s['iteration']:.0f}",
    f"x {BASE.name}": lambda s: f"{s['speed']:.2f}x",
    "step, ms": lambda s: f"{s['step']:.0f}",
    "CPU, ms": lambda s: f"{s['cpu']:.0f}",
    "PSS, MB": lambda s: f"{s['pss'] / 1e6:.0f}",
    "sent, MB": lambda s: f"{s['sent'] / 1e6:.0f}",
    "loss": lambda s: f"{s['loss']:.6g}",
}


def markdown(case: Case, table: Table) -> str:
    lines = [f"| {case} | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for row, summary in table.items():
        cells = " | ".join(cell(summary) for cell in COLUMNS.values())
        lines.append(f"| {row} | {cells} |")
    return "\n".join(lines)


def goals(readings: dict[Case, Rounds], tables: dict[Case, Table]) -> str:
    """Every goal whose rows ran; empty when none did."""
    head = ["| goal | against | ranks | asked | measured | |", "|---|---|---|---|---|---|"]
    lines = []
    for goal in GOALS:
        for case, table in tables.items():
            names = (goal.row.name, goal.base.name)
            if case.link != goal.link or case.ranks not in goal.ranks:
                continue
            if not all(name in table for name in names):
                continue
            if goal.times is not None:
                measured, asked = speed(readings[case], *names), goal.times
                what, met = "as fast", measured >= asked
            else:
                measured, asked = table[names[0]]["pss"] / table[names[1]]["pss"], goal.memory
                what, met = "memory", measured <= asked
            lines.append(
                f"| {goal.what} | {goal.base.name} | {case.ranks} | {asked:.2f}x {what} "
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
        rows = list(reversed(table))
        step = [table[row]["step"] for row in rows]
        rest = [table[row]["iteration"] - table[row]["step"] for row in rows]
        left.barh(rows, rest, color="lightgray", label="forward and backward")
        left.barh(rows, step, left=rest, color="tab:blue", label="step()")
        left.set_title(str(case), fontsize=10)
        left.set_xlabel("ms an iteration")
        if FLOOR.name in table:
            left.axvline(table[FLOOR.name]["iteration"], color="black", linewidth=0.8, ls=":")
        right.barh(rows, [table[row]["pss"] / 1e6 for row in rows], color="tab:orange")
        right.set_xlabel("proportional set size of a rank, MB")
    axes[0][0].legend(fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
