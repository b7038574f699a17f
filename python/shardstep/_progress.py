"""A progress bar on standard error, for what takes longer than a second."""

import shutil
import sys
import time

_PATIENCE = 1.0
_INTERVAL = 0.1


class ProgressBar:
    """Bytes done, of how many. Says nothing where standard error is no terminal."""

    def __init__(self, what: str, total: int = 0) -> None:
        self._what = what
        self._done, self._total = 0, total
        self._next = time.monotonic() + _PATIENCE
        self._shown = False

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def advance(self, count: int) -> None:
        self.show(self._done + count, self._total)

    def show(self, done: int, total: int) -> None:
        self._done, self._total = done, total
        if time.monotonic() < self._next or not sys.stderr.isatty():
            return
        self._next = time.monotonic() + _INTERVAL
        self._shown = True
        share = min(1.0, done / total) if total else 0.0
        end = f" {100 * share:3.0f} % of {total / 1e6:.0f} MB"
        width = max(10, shutil.get_terminal_size().columns - len(self._what) - len(end) - 4)
        bar = ("#" * round(width * share)).ljust(width)
        sys.stderr.write(f"\r{self._what} [{bar}]{end}")
        sys.stderr.flush()
