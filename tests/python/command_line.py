"""Runs a command of ours inside the test's process, since importing torch is slow."""

import contextlib
import dataclasses
import io
import subprocess
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Command:
    main: Callable[[list[str]], int]
    name: str
    """What its errors start with."""
    silent: bool = False
    """Whether it writes nothing but errors to stderr."""

    def __call__(self, *arguments) -> subprocess.CompletedProcess:
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            try:
                code = self.main(list(map(str, arguments)))
            except SystemExit as exited:  # argparse
                code = exited.code
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())

    def succeed(self, *arguments) -> str:
        result = self(*arguments)
        assert result.returncode == 0, result.stderr
        assert not (self.silent and result.stderr)
        return result.stdout

    def refused(self, *arguments) -> str:
        """The one sentence that says why."""
        result = self(*arguments)
        assert result.returncode == 2, result
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1
        assert result.stderr.startswith(f"{self.name}: error: ")
        return result.stderr
