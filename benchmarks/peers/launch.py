"""Starts the ranks of a contestant in fresh processes and waits for what they measured."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORKER = Path(__file__).resolve().parent / "worker.py"

Readings = dict[str, list[float]]


class TurnFailed(Exception):
    """Why a contestant has no readings."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the ranks run: one a prefix, which is put before its command."""

    prefixes: list[list[str]]
    interface: str


@dataclasses.dataclass(frozen=True)
class Environment:
    """The Python that ranks run, and what it wants in os.environ."""

    python: Path
    variables: dict[str, str]


def run_ranks(
    place: Place, environment: Environment, arguments: list[str], timeout: float
) -> Readings:
    """Runs worker.py with these arguments and its rank's own."""
    with tempfile.TemporaryDirectory(prefix="shardstep-peers-") as name:
        folder, processes = Path(name), []
        with contextlib.ExitStack() as stack:
            for rank, prefix in enumerate(place.prefixes):
                log = stack.enter_context(open(folder / f"log{rank}", "w"))
                command = [*prefix, str(environment.python), str(WORKER), *arguments]
                command += ["--timeout", str(timeout), "--store", str(folder / "store")]
                command += ["--result", str(folder / f"result{rank}")]
                process = subprocess.Popen(
                    command,
                    env={**os.environ, **environment.variables, **rank_variables(place, rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
                stack.callback(end, process)
                processes.append(process)
            failed = wait(processes, timeout)
        if failed is not None:
            rank, why = failed
            raise TurnFailed(f"rank {rank} {why}\n{tail(folder / f'log{rank}')}")
        return merge(
            [json.loads((folder / f"result{r}").read_text()) for r in range(len(processes))]
        )


def rank_variables(place: Place, rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(len(place.prefixes)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": place.interface,
    }


def wait(processes: list[subprocess.Popen], timeout: float) -> tuple[int, str] | None:
    """None when all ended well; else the rank that did not, and how."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                return rank, f"ended with {code}"
        if None not in codes:
            return None
        time.sleep(0.1)
    return next(
        r for r, p in enumerate(processes) if p.poll() is None
    ), f"took over {timeout:.0f} s"


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


def tail(log: Path, lines: int = 12) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def merge(results: list[Readings]) -> Readings:
    """Sizes are the largest rank's, processor time is all ranks'."""
    merged = {key: list(results[0][key]) for key in ("iteration", "step", "loss")}
    for key, over_ranks in (("cpu", sum), ("sent", max)):
        merged[key] = [over_ranks(vs) for vs in zip(*(r[key] for r in results), strict=True)]
    merged["pss"] = [max(value for r in results for value in r["pss"])]
    return merged


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
