#!/usr/bin/env python3
"""Builds and tests shardstep with several versions of torch, each in an environment of its own.

For each version: a virtual environment, torch, the library and its tests, a wheel of the same
build, then the C++ and the Python tests. Of two builds of one torch, next to each other in the
list, each also loads the wheel that was built with the other. Prints one table. PyPI's builds of
torch need CUDA's libraries, about 6 GB per environment: those of one minor version are removed
before the next unless --keep is given; what --keep left is used again. `2.13.0` takes the CPU build
where an index has one, `=2.13.0` PyPI's own. Logs are kept in the folder.
"""

import argparse
import dataclasses
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ["2.12.1", "2.13.0", "=2.13.0", "2.14.1", "2.15.0"]


class Failed(Exception):
    pass


@dataclasses.dataclass
class Row:
    version: str
    torch: str = ""
    nccl: str = ""
    built: str = ""
    cpp: str = ""
    python: str = ""
    other: str = ""
    minutes: float = 0.0

    COLUMNS = (
        "torch",
        "build of torch",
        "NCCL",
        "`pip install .`",
        "C++ tests",
        "Python tests",
        "wheel of the other build",
    )

    def cells(self) -> tuple[str, ...]:
        version = self.version.lstrip("=")
        return version, self.torch, self.nccl, self.built, self.cpp, self.python, self.other


class Environment:
    """A virtual environment with one version of torch, and a build folder."""

    def __init__(self, folder: Path, row: Row, limit: float):
        self.row, self.limit = row, limit
        self.folder = folder / row.version.replace("=", "pypi-")
        self.bin, self.build = self.folder / "venv" / "bin", self.folder / "build"
        self.log = folder / f"{self.folder.name}.log"

    def run(self, what: str, *command: object) -> str:
        """What the command printed; raises Failed unless it succeeds."""
        print(f"torch {self.row.version}: {what} ...", file=sys.stderr, flush=True)
        path = f"{self.bin}:{os.environ['PATH']}"
        result = subprocess.run(
            [str(word) for word in command],
            cwd=ROOT,
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=self.limit,
        )
        with open(self.log, "a") as log:
            log.write(f"$ {' '.join(map(str, command))}\n{result.stdout}\n")
        if result.returncode != 0:
            raise Failed(f"{what}: exit status {result.returncode}, see {self.log}")
        return result.stdout

    def pip_install(self, what: str, *arguments: object) -> None:
        pip = (self.bin / "python", "-m", "pip", "install", "--quiet", "--no-compile")
        self.run(what, *pip, "--disable-pip-version-check", *arguments)

    def prepare(self) -> None:
        self.log.unlink(missing_ok=True)
        if not (self.folder / "constraint.txt").exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.run("making an environment", sys.executable, "-m", "venv", self.folder / "venv")
        self.pip_install("installing torch", f"torch=={self.row.version}", "ninja")
        # The version in the metadata, without the "+cu132" that torch.__version__ may add.
        ask = "from importlib.metadata import version; import torch; "
        ask += "print(version('torch'), torch.version.cuda or 'CPU')"
        version, cuda = self.run("asking torch", self.bin / "python", "-c", ask).split()[-2:]
        self.row.torch = "CPU" if cuda == "CPU" else f"CUDA {cuda}"
        # What the tests need depends on torch too, and must not bring another one.
        constraint = self.folder / "constraint.txt"
        constraint.write_text(f"torch==={version}\n")
        requirements = (ROOT / "requirements" / f"{part}.txt" for part in ("python", "test"))
        lists = [word for path in requirements for word in ("-r", path)]
        self.pip_install("installing what the tests need", "-c", constraint, *lists)

    def install(self, jobs: int) -> None:
        configure = ("cmake", "-S", ROOT, "-B", self.build, "-G", "Ninja")
        python = f"-DPython_EXECUTABLE={self.bin / 'python'}"
        make = f"CMAKE_MAKE_PROGRAM={self.bin / 'ninja'}"
        said = self.run("configuring", *configure, python, f"-D{make}")
        self.row.nccl = "compiled" if re.search(r"shardstep: with NCCL", said) else "no"
        self.run("building", self.bin / "ninja", "-C", self.build, "-j", jobs)
        (self.build / ".skbuild-info.json").unlink(missing_ok=True)
        shutil.rmtree(self.folder / "wheel", ignore_errors=True)
        pip = (self.bin / "python", "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check")
        options = ("-C", f"build-dir={self.build}", "-C", f"cmake.define.{make}")
        without = ("--no-build-isolation", "--no-deps", "--wheel-dir", self.folder / "wheel")
        self.run("packing a wheel", *pip, *without, *options, ROOT)
        self.install_wheel(self)
        self.row.built = "yes"

    def install_wheel(self, built_by: "Environment") -> None:
        (wheel,) = (built_by.folder / "wheel").glob("*.whl")
        self.pip_install("installing the wheel", "--no-deps", "--force-reinstall", wheel)

    def try_wheel(self, built_by: "Environment") -> None:
        self.row.other = "failed"
        self.install_wheel(built_by)
        tests = [f"tests/python/zero/test_{name}.py" for name in ("parity", "surface", "stage2")]
        said = self.run(
            f"testing the wheel of {built_by.row.torch}",
            *(self.bin / "python", "-m", "pytest", "-q", "-n", 2, *tests),
        )
        self.row.other = self._sum([said.splitlines()[-1]])

    def test(self, jobs: int) -> None:
        command = (self.bin / "python", ROOT / "tools" / "run_tests.py", "--build", self.build)
        try:
            self.run("testing", *command, "--jobs", jobs)
        except Failed as error:
            print(error, file=sys.stderr)
        said = self.log.read_text(errors="replace").rpartition("run_tests.py")[2]
        lines = re.findall(r"^(\w+)(?:\[\d+/\d+\])?: (.*) in \d+ s", said, re.M)
        self.row.python = self._sum(counts for name, counts in lines if name == "pytest")
        self.row.cpp = self._sum(counts for name, counts in lines if name != "pytest")

    @staticmethod
    def _sum(counts) -> str:
        total = {"passed": 0, "failed": 0, "skipped": 0}
        for text in counts:
            for number, outcome in re.findall(r"(\d+) (passed|failed|skipped)", text):
                total[outcome] += int(number)
        return ", ".join(f"{n} {what}" for what, n in total.items() if n) or "none ran"


def run_version(environment: Environment, jobs: int) -> None:
    began = time.monotonic()
    row = environment.row
    try:
        environment.prepare()
        environment.install(jobs)
        environment.test(jobs)
    except (Failed, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        row.built = row.built or "failed"
    row.minutes = (time.monotonic() - began) / 60


def try_wheels(environments: list[Environment]) -> None:
    """Each build of a torch loads what was built with another."""
    for mine, theirs in itertools.permutations(environments, 2):
        if mine.row.built != "yes" or theirs.row.built != "yes":
            continue
        try:
            mine.try_wheel(theirs)
        except (Failed, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr)


def minor_of(version: str) -> str:
    return ".".join(version.lstrip("=").split(".")[:2])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", default=VERSIONS, help=" ".join(VERSIONS))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "torch_matrix")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--keep", action="store_true", help="do not remove the environments")
    parser.add_argument("--limit", type=float, default=3600, help="seconds per command")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for _, versions in itertools.groupby(arguments.versions, minor_of):
        environments = [
            Environment(arguments.folder.resolve(), Row(version), arguments.limit)
            for version in versions
        ]
        for environment in environments:
            run_version(environment, arguments.jobs)
            rows.append(environment.row)
        try_wheels(environments)
        if not arguments.keep:
            for environment in environments:
                shutil.rmtree(environment.folder, ignore_errors=True)
    print(f"| {' | '.join(Row.COLUMNS)} |\n|{'---|' * len(Row.COLUMNS)}")
    for row in rows:
        print(f"| {' | '.join(row.cells())} |")
        print(f"torch {row.version}: {row.minutes:.0f} min", file=sys.stderr)
    good = all("failed" not in " ".join(row.cells()) and row.python for row in rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
