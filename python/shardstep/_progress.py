"""A progress bar on standard error, for work that takes longer than a second."""

import os
import sys
from collections.abc import Callable

from tqdm import tqdm

Progress = Callable[[int, int], object]

_PATIENCE_SECONDS = 1.0


class _Bar(tqdm):  # type: ignore[type-arg]
    monitor_interval = 0  # no thread that refreshes stalled bars


class ProgressBar:
    """Shows bytes done and in total. Appears only on a terminal, unless `always`."""

    def __init__(self, what: str, total: int = 0, always: bool = False) -> None:
        self._bar = _Bar(
            desc=what,
            total=total,
            unit="B",
            unit_scale=True,
            delay=_PATIENCE_SECONDS,
            leave=False,
            disable=False if always else None,
        )

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def advance(self, count: int) -> None:
        self._bar.update(count)

    def show(self, done: int, total: int) -> None:
        """The bar vanishes when all is done."""
        self._bar.total = total
        self._bar.update(done - self._bar.n)
        if done >= total:
            self.close()

    def close(self) -> None:
        self._bar.close()


def saving_progress(
    progress: bool | Progress | None,
    directory: str | os.PathLike[str],
    rank: int,
    asynchronous: bool,
) -> Progress | None:
    """The function to call with bytes written and in total. None: a bar on rank 0's terminal."""
    if callable(progress):
        return progress
    unwanted = progress is None and (asynchronous or rank != 0 or not sys.stderr.isatty())
    if unwanted or progress is False:
        return None
    return ProgressBar(f"saving {os.fspath(directory)}", always=progress is True).show
