"""Tables, sizes and errors as text, for commands."""

import argparse
import sys
from collections.abc import Iterator, Sequence


def size(count: float) -> str:
    """In decimal units: 1.5 GB."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.0f} B" if units[0] == "B" else f"{count:.1f} {units[0]}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: set[int]) -> Iterator[str]:
    """Aligned columns, those in `right` to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = (
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def one_line(error: BaseException) -> str:
    """The error's message without its C++ backtrace."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].removeprefix("shardstep: ")


def run_command(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    """Runs the chosen command; an error becomes a sentence and exit status 2."""
    chosen = parser.parse_args(arguments)
    try:
        return chosen.run(chosen)  # type: ignore[no-any-return]
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"{parser.prog}: error: {one_line(error)}", file=sys.stderr)
        return 2
