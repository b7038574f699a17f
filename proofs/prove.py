#!/usr/bin/env python3
"""Checks the models in proofs/ with spin, and that spin catches each of their mutations.

A model (*.pml) lists its checks in comments, one per line:

  // run: what it shows | flags for spin | safety, or ltl <name>
  // mutation: MACRO | flags for spin | safety, or ltl <name> | what spin must say

A run must explore every state without an error. A mutation defines MACRO, which breaks the model in
one place, and is caught if spin reports what the line says. Safety covers assertions and ranks that
wait for ever; ltl is checked for all weakly fair schedules.
"""

import argparse
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

PROOFS = Path(__file__).resolve().parent
LINE = re.compile(r"^// (run|mutation): (.+)$", re.M)


@dataclass
class Check:
    model: str
    title: str
    flags: list[str]
    claim: str | None  # None: safety
    expected: str | None  # what spin reports; None: no error

    @property
    def name(self) -> str:
        return f"{self.model}: {self.title}"


@dataclass
class Result:
    check: Check
    seconds: float  # of CPU
    states: int = 0
    depth: int = 0
    errors: list[str] = field(default_factory=list)
    problem: str | None = None

    @property
    def good(self) -> bool:
        if self.problem:
            return False
        if self.check.expected is None:
            return not self.errors
        return any(self.check.expected in error for error in self.errors)

    @property
    def verdict(self) -> str:
        found = "; ".join(self.errors) or "no error"
        if self.problem:
            return f"FAILED: {self.problem}"
        if self.good:
            return "holds" if self.check.expected is None else f"caught ({found})"
        if self.check.expected is None:
            return f"FAILED: {found}"
        return f"NOT CAUGHT: expected '{self.check.expected}', got {found}"


def checks_of(path: Path) -> list[Check]:
    checks = []
    for kind, line in LINE.findall(path.read_text()):
        title, flags, how, *expected = (part.strip() for part in line.split("|"))
        if len(expected) != (kind == "mutation"):
            sys.exit(f"prove: cannot read this line of {path.name}: {line}")
        more = [f"-D{title}"] if kind == "mutation" else []
        checks.append(
            Check(
                path.stem,
                title,
                flags.split() + more,
                how.removeprefix("ltl ") if how.startswith("ltl ") else None,
                expected[0] if expected else None,
            )
        )
    return checks


def run(command: list[str], folder: Path, limit: int, result: Result) -> str:
    """Adds to the result the CPU time that the command has used, which `limit` bounds."""
    with (folder / "log.txt").open("a+") as log:
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        begin = log.seek(0, os.SEEK_END)
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (limit, limit))
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(begin)
        output = log.read()
    result.seconds += used.ru_utime + used.ru_stime
    if process.returncode == -signal.SIGKILL and used.ru_utime + used.ru_stime > limit - 1:
        raise RuntimeError(f"took longer than {limit} s of CPU")
    if process.returncode != 0:
        raise RuntimeError(f"{command[0]} failed: {output.strip().splitlines()[-1:]}")
    return output


def read_report(output: str, result: Result) -> None:
    result.errors = [error.strip() for error in re.findall(r"^pan:\d+: (.+?) \(at", output, re.M)]
    states = re.search(r"^\s*(\d+) states, stored", output, re.M)
    depth = re.search(r"depth reached (\d+)", output)
    if not states or not depth:
        result.problem = "no report from pan"
        return
    result.states, result.depth = int(states[1]), int(depth[1])
    for trouble in ("max search depth too small", "Search not completed", "out of memory"):
        if trouble in output and not result.errors:
            result.problem = trouble


def prove(check: Check, spin: str, build: Path, limit: int) -> Result:
    result = Result(check, 0)
    words = re.sub(r"\W+", "_", f"{check.model} {check.title}".lower())
    folder = build / words
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    options = ["-DSAFETY", "-DNOCLAIM"] if check.claim is None else ["-DNFAIR=3"]
    search = ["-a", "-f", "-N", check.claim] if check.claim else []
    try:
        run([spin, "-a", *check.flags, str(PROOFS / f"{check.model}.pml")], folder, limit, result)
        cc = os.environ.get("CC", "cc")
        optimize = "-O0" if check.expected else "-O1"  # a mutation ends soon
        run(
            [cc, optimize, "-w", "-DCOLLAPSE", "-DMEMLIM=4096", *options, "-o", "pan", "pan.c"],
            folder,
            limit,
            result,
        )
        read_report(run(["./pan", "-m2000000", *search], folder, limit, result), result)
    except (RuntimeError, OSError) as error:
        result.problem = str(error)
    finally:
        for name in folder.glob("pan*"):
            name.unlink()
    return result


def parse(models: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of: {', '.join(models)}")
    parser.add_argument("-k", default="", help="only checks whose title contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=int, default=300, help="seconds of CPU for a command")
    parser.add_argument("--build", type=Path, default=PROOFS.parent / "build" / "prove")
    parser.add_argument("--list", action="store_true", help="list the checks and leave")
    parser.add_argument("--spin", default=None, help="path of the spin program")
    arguments = parser.parse_args()
    for model in arguments.models:
        if model not in models:
            parser.error(f"expected one of {', '.join(models)}, got {model}")
    return arguments


def find_spin(given: str | None) -> str:
    unpacked = PROOFS.parent / ".venv/system/usr/bin/spin"
    spin = given or shutil.which("spin") or (str(unpacked) if unpacked.exists() else None)
    if not spin:
        sys.exit("prove: expected the program spin, got none; install it (Debian: spin)")
    return spin


def main() -> int:
    models = sorted(path.stem for path in PROOFS.glob("*.pml"))
    arguments = parse(models)
    checks = [
        check
        for model in arguments.models or models
        for check in checks_of(PROOFS / f"{model}.pml")
        if arguments.k in check.title
    ]
    if arguments.list:
        print("\n".join(check.name for check in checks))
        return 0
    if not checks:
        sys.exit("prove: expected at least one check, got none")
    spin = find_spin(arguments.spin)
    begin = time.monotonic()
    results = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        started = [
            pool.submit(prove, check, spin, arguments.build.resolve(), arguments.limit)
            for check in checks
        ]
        for number, future in enumerate(started, 1):
            result = future.result()
            results.append(result)
            print(
                f"[{number}/{len(checks)}] {result.check.name}: {result.states} states, depth "
                f"{result.depth}, {result.seconds:.1f} s of CPU: {result.verdict}",
                flush=True,
            )
    sys.stdout.flush()
    return close(results, time.monotonic() - begin, arguments.build)


def close(results: list[Result], seconds: float, build: Path) -> int:
    runs = [result for result in results if result.check.expected is None]
    mutations = [result for result in results if result.check.expected is not None]
    bad = [result for result in results if not result.good]
    print(
        f"{sum(r.good for r in runs)} of {len(runs)} runs hold "
        f"({sum(r.states for r in runs)} states), "
        f"{sum(r.good for r in mutations)} of {len(mutations)} mutations caught, "
        f"{seconds:.0f} s, {sum(r.seconds for r in results):.0f} s of CPU; logs in {build}"
    )
    for result in bad:
        print(f"prove: {result.check.name}: {result.verdict}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
