"""How the Python benchmarks print their results."""

from collections.abc import Callable

Summary = dict[str, float]
Table = dict[str, Summary]  # by row


def markdown(title: str, columns: dict[str, Callable[[Summary], str]], table: Table) -> str:
    lines = [f"| {title} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for row, summary in table.items():
        cells = " | ".join(cell(summary) for cell in columns.values())
        lines.append(f"| {row} | {cells} |")
    return "\n".join(lines)


def draw_iterations(axes, title: str, table: Table) -> list[str]:
    """Bars of "iteration" and, in it, "step". Returns the rows from the bottom up."""
    rows = list(reversed(table))
    step = [table[row]["step"] for row in rows]
    rest = [table[row]["iteration"] - table[row]["step"] for row in rows]
    axes.barh(rows, rest, color="lightgray", label="forward and backward")
    axes.barh(rows, step, left=rest, color="tab:blue", label="step()")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("ms per iteration")
    return rows
