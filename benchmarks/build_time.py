#!/usr/bin/env python3
"""Times what a newcomer and a contributor wait for, from a clean clone and without ccache.

demo     make demo, everything included
test     make test, everything included, nothing built before
compile  time in the compiler and the linker, summed over ninja's log of the whole build
touch    for each layer: touch one of its sources, rebuild, run its C++ tests

The clone holds what is committed. Run it on an otherwise idle machine. Progress and the end of the
commands' output go to stderr, the table to stdout.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def say(text: str) -> None:
    print(f"build_time: {text}", file=sys.stderr, flush=True)


class Failed(Exception):
    pass


class Clones:
    """Clean clones in a temporary folder."""

    def __init__(self, folder: Path, limit: float):
        self.folder, self.limit, self.count = folder, limit, 0
        self.built: Path | None = None

    def clean(self) -> Path:
        self.count += 1
        clone = self.folder / f"clone-{self.count}"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        return clone

    def with_everything_built(self) -> Path:
        if self.built is None:
            self.built = self.clean()
            self.run(self.built, "make", "build")
        return self.built

    def run(self, clone: Path, *command: str) -> float:
        """How many seconds it took."""
        say(f"{' '.join(command)} ...")
        environment = {**os.environ, "CCACHE_DISABLE": "1"}
        log = self.folder / "output"
        start = time.monotonic()
        with open(log, "w") as output:
            code = subprocess.run(
                command,
                cwd=clone,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=self.limit,
            ).returncode
        seconds = time.monotonic() - start
        say(f"{' '.join(command)}: exit status {code} after {seconds:.0f} s")
        if code != 0:
            print(*log.read_text(errors="replace").splitlines()[-30:], sep="\n", file=sys.stderr)
            raise Failed(f"{' '.join(command)} failed")
        return seconds


def time_demo(clones: Clones) -> list[tuple[str, float]]:
    clone = clones.clean()
    seconds = clones.run(clone, "make", "demo")
    shutil.rmtree(clone)
    return [("make demo, everything included", seconds)]


def time_test(clones: Clones) -> list[tuple[str, float]]:
    clone = clones.clean()
    seconds = clones.run(clone, "make", "test")
    clones.built = clone
    return [("make test, everything included, nothing built before", seconds)]


def time_compile(clones: Clones) -> list[tuple[str, float]]:
    log = clones.with_everything_built() / "build" / ".ninja_log"
    outputs = {}  # the last line about an output is the one that counts
    for line in log.read_text().splitlines()[1:]:
        start, end, _, output, _ = line.split("\t")
        if output.endswith((".o", ".so")) or "." not in Path(output).name:
            outputs[output] = (int(end) - int(start)) / 1000
    slowest = max(outputs, key=outputs.__getitem__)
    say(f"{len(outputs)} outputs; {slowest} took longest, {outputs[slowest]:.0f} s")
    return [("compiler time of the whole build, summed over files", sum(outputs.values()))]


def time_touch(clones: Clones) -> list[tuple[str, float]]:
    clone = clones.with_everything_built()
    rows = []
    for layer in sorted(path.name for path in (clone / "src").iterdir() if path.is_dir()):
        tests = sorted((clone / "build" / "tests").glob(f"{layer}*_test"))
        sources = sorted((clone / "src" / layer).rglob("*.cpp"))
        if not tests or not sources:
            say(f"{layer}: no test binary or no source, left out")
            continue
        sources[0].touch()
        names = [test.name for test in tests]
        seconds = clones.run(clone, ".venv/bin/ninja", "-C", "build", *names)
        seconds += clones.run(clone, ".venv/bin/python", "tools/run_tests.py", "--layer", layer)
        rows.append((f"touch src/{layer}/{sources[0].name}, rebuild, test the layer", seconds))
    return rows


ROWS: dict[str, tuple[Callable[[Clones], list[tuple[str, float]]], int]] = {
    "demo": (time_demo, 240),
    "test": (time_test, 600),
    "compile": (time_compile, 600),
    "touch": (time_touch, 60),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="default: all")
    parser.add_argument("--limit", type=float, default=3600, help="seconds per command")
    arguments = parser.parse_args()
    dirty = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    if dirty:
        say("the clone is made without your uncommitted changes")
    load = os.getloadavg()[0]
    if load > 0.5:
        say(f"the machine is not idle (load {load:.1f}): the times will be too long")
    table, failed = [], False
    with tempfile.TemporaryDirectory(prefix="shardstep-build-time-") as folder:
        clones = Clones(Path(folder), arguments.limit)
        for name in arguments.rows:
            measure, goal = ROWS[name]
            try:
                table += [(what, seconds, goal) for what, seconds in measure(clones)]
            except (Failed, subprocess.TimeoutExpired) as error:
                say(str(error))
                failed = True
    print(f"| {os.cpu_count()} cores, load {load:.1f} before | seconds | goal |\n|---|---|---|")
    for what, seconds, goal in table:
        print(f"| {what} | {seconds:.0f} | {goal} |")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
