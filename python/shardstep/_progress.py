"""A progress bar on standard error, for what takes longer than a second."""

import shutil
import sys
import time

_PATIENCE = 1.0
_INTERVAL = 0.1


class ProgressBar:
    """Bytes done, of how many. Only a terminal shows it, unless it is wanted `always`."""

    def __init__(self, what: str, total: int = 0, always: bool = False) -> None:
        self._what = what
        self._done, self._total = 0, total
        self._wanted = always or sys.stderr.isatty()
        self._next = time.monotonic() + _PATIENCE
        self._shown = False

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def advance(self, count: int) -> None:
        self.show(self._done + count, self._total)

    def show(self, done: int, total: int) -> None:
        """The bar vanishes when all is done."""
        self._done, self._total = done, total
        now = time.monotonic()
        if done >= total:
            self.close()
        elif self._wanted and now >= self._next:
            self._next = now + _INTERVAL
            self._shown = True
            self._draw()

    def close(self) -> None:
        if self._shown:
            self._shown = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _draw(self) -> None:
        share = self._done / self._total
        end = f" {100 * share:3.0f} % of {self._total / 1e6:.0f} MB"
        width = max(10, shutil.get_terminal_size().columns - len(self._what) - len(end) - 4)
        bar = ("#" * round(width * share)).ljust(width)
        sys.stderr.write(f"\r{self._what} [{bar}]{end}")
        sys.stderr.flush()
