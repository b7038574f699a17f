"""The bar of long saves and conversions."""

import io
import sys

import pytest
from shardstep import _progress
from shardstep._progress import ProgressBar, saving_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(_progress, "_PATIENCE_SECONDS", 0.0)


def test_a_terminal_sees_a_bar_that_vanishes_when_all_is_done(impatient, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with ProgressBar("saving", total=200_000_000) as bar:
        bar.advance(100_000_000)
        bar.show(150_000_000, 200_000_000)
        assert "saving" in terminal.getvalue()
        bar.show(200_000_000, 200_000_000)
    assert terminal.getvalue().endswith("\r")


def test_what_is_done_within_a_second_shows_nothing(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with ProgressBar("saving", total=200_000_000) as bar:
        bar.advance(50_000_000)
        bar.show(200_000_000, 200_000_000)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("always", [False, True])
def test_elsewhere_only_who_asks_sees_it(impatient, monkeypatch, always):
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with ProgressBar("saving", total=2, always=always) as bar:
        bar.show(1, 2)
    assert ("saving" in file.getvalue()) == always


def test_who_gets_a_bar_of_a_save(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())

    def heard(done: int, total: int) -> None: ...

    assert saving_progress(heard, "d", rank=3, asynchronous=True) is heard
    assert saving_progress(None, "d", rank=0, asynchronous=False) is not None
    assert saving_progress(None, "d", rank=1, asynchronous=False) is None
    assert saving_progress(None, "d", rank=0, asynchronous=True) is None
    assert saving_progress(False, "d", rank=0, asynchronous=False) is None
    assert saving_progress(True, "d", rank=1, asynchronous=True) is not None
