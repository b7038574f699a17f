"""The ranks of a contestant: fresh processes that are told what to do."""

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

WORKER = Path(__file__).resolve().parent / "worker.py"

Readings = dict[str, float]


class RanksFailed(Exception):
    """Why a contestant has no readings."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the ranks run: one a prefix, which is put before its command."""

    prefixes: list[list[str]]
    interface: str
    # What each host has sent over its link so far.
    bytes_sent: Callable[[], list[int]] = list


@dataclasses.dataclass(frozen=True)
class Environment:
    """The Python that ranks run, and what it wants in os.environ."""

    python: Path
    variables: dict[str, str]


class Ranks:
    """Processes of worker.py with these arguments; they end with this context."""

    def __init__(
        self, place: Place, environment: Environment, arguments: list[str], timeout: float
    ):
        self._place = place
        self._timeout = timeout
        self._processes: list[subprocess.Popen] = []
        with contextlib.ExitStack() as stack:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="shardstep-peers-"))
            self._folder = Path(name)
            arguments = [*arguments, "--timeout", str(timeout), "--store", f"{name}/store"]
            for rank, prefix in enumerate(place.prefixes):
                with open(self._log(rank), "w") as log:
                    process = subprocess.Popen(
                        [*prefix, str(environment.python), str(WORKER), *arguments],
                        env={**os.environ, **environment.variables, **rank_variables(place, rank)},
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                    )
                stack.callback(end, process)
                self._processes.append(process)
            self._stack = stack.pop_all()

    def iterate(self, count: int) -> Readings:
        """Sizes are the largest rank's, or host's on its link; processor time is all ranks'."""
        before = self._place.bytes_sent()
        results = self._order("iterate", count)
        after = self._place.bytes_sent()
        cpu, sent = sum(r["cpu"] for r in results), max(r["sent"] for r in results)
        link = max((a - b for a, b in zip(after, before, strict=True)), default=0) / count
        return results[0] | {"cpu": cpu, "sent": sent, "link": link}

    def peak_memory(self) -> float:
        """Of the largest rank, in bytes."""
        return max(result["pss"] for result in self._order("sample"))

    def _order(self, *order: str | int) -> list[Readings]:
        waiting = dict(enumerate(self._processes))
        answers: dict[int, Readings] = {}
        deadline = time.monotonic() + self._timeout
        for rank, process in waiting.items():
            try:
                print(json.dumps(order), file=process.stdin, flush=True)
            except BrokenPipeError:
                raise self._failure(rank, "ended") from None
        while waiting:
            pipes = {process.stdout: rank for rank, process in waiting.items()}
            ready, *_ = select.select(list(pipes), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._failure(min(waiting), f"took over {self._timeout:.0f} s")
            for pipe in ready:
                rank = pipes[pipe]
                line = waiting.pop(rank).stdout.readline()
                if not line:
                    raise self._failure(rank, "ended")
                answers[rank] = json.loads(line)
        return [answers[rank] for rank in sorted(answers)]

    def _log(self, rank: int) -> Path:
        return self._folder / f"log{rank}"

    def _failure(self, rank: int, why: str) -> "RanksFailed":
        lines = self._log(rank).read_text(errors="replace").splitlines()[-12:]
        return RanksFailed("\n".join([f"rank {rank} {why}", *lines]))

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def rank_variables(place: Place, rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(len(place.prefixes)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": place.interface,
    }


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
