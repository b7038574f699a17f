"""The bar of long saves and conversions."""

import io
import sys

import pytest
from shardstep import _progress
from shardstep._progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now[0])
    return now


def test_a_terminal_sees_a_bar_after_a_second(clock, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with ProgressBar("saving", total=200_000_000) as bar:
        bar.advance(50_000_000)
        assert terminal.getvalue() == ""
        clock[0] = 1.5
        bar.advance(50_000_000)
        assert terminal.getvalue().startswith("\rsaving [##")
        assert terminal.getvalue().endswith("]  50 % of 200 MB")
        seen = len(terminal.getvalue())
        bar.advance(1)  # too soon for another look
        assert len(terminal.getvalue()) == seen
        bar.show(200_000_000, 200_000_000)
        assert terminal.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize("always", [False, True])
def test_elsewhere_only_who_asks_sees_it(clock, monkeypatch, always):
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    bar = ProgressBar("saving", always=always)
    clock[0] = 2.0
    bar.show(1, 2)
    assert ("50 %" in file.getvalue()) == always


def test_nothing_to_do_draws_nothing(clock, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = ProgressBar("saving")
    clock[0] = 2.0
    bar.show(0, 0)
    assert terminal.getvalue() == ""
