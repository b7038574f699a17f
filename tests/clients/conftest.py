"""Writes docs/clients.md from what the tests found, if SHARDSTEP_CLIENTS_TABLE names the file.

A test says where its outcome belongs by the fixture `place`. Rows of which no test ran stay as they
are, with their dates.
"""

import collections
import dataclasses
import datetime
import os
from pathlib import Path

import pytest
import torch


@dataclasses.dataclass(frozen=True)
class Place:
    table: str
    row: tuple[str, ...]
    column: str
    passed: str = "yes"
    note: str = ""


_PLACE = pytest.StashKey[Place]()
_outcomes: dict[str, dict[tuple[str, ...], dict[str, str]]] = collections.defaultdict(dict)

ORDER: dict[str, list[str]] = {"trainers": [], "optimizers": []}
"""Names of all rows; the tests add theirs when they are collected."""
COLUMNS = {
    "trainers": ("stage1", "stage2"),
    "optimizers": ("stage1-parameter", "stage1-element", "stage2-parameter", "stage2-element"),
}


@pytest.fixture
def place(request):
    """place(table, row, column, passed="yes", note=""): where the test's outcome is shown."""

    def set_place(*arguments, **options) -> None:
        request.node.stash[_PLACE] = Place(*arguments, **options)

    return set_place


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    place = item.stash.get(_PLACE, None)
    if report.when == "call" and place is not None:
        cells = _outcomes[place.table].setdefault(place.row, {"note": place.note})
        cells[place.column] = place.passed if report.passed else "**no**"


def _rows(table: str, before: str) -> str:
    rows = {}
    for line in before.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] in ORDER[table]:
            rows[cells[0]] = line
    for row, cells in _outcomes[table].items():
        shown = [cells.get(column, "not run") for column in COLUMNS[table]]
        shown += [cells["note"]] if table == "trainers" else []
        line = [*row, str(datetime.date.today()), *shown]
        rows[row[0]] = "| " + " | ".join(line) + " |"
    return "\n".join(rows[name] for name in ORDER[table] if name in rows)


def pytest_sessionfinish(session) -> None:
    path = os.environ.get("SHARDSTEP_CLIENTS_TABLE")
    if not path or not _outcomes:
        return
    file = Path(path)
    before = file.read_text() if file.exists() else ""
    text = Path(__file__).with_name("clients.md.in").read_text()
    replacements = {
        "@TORCH@": torch.__version__,
        "@TRAINERS@": _rows("trainers", before),
        "@OPTIMIZERS@": _rows("optimizers", before),
    }
    for word, replacement in replacements.items():
        text = text.replace(word, replacement)
    file.write_text(text)
