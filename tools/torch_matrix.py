#!/usr/bin/env python3
"""Builds and tests shardstep with several versions of torch, each in an environment of its own.

For each version: a virtual environment, torch, `pip install .`, then the C++ tests, built with the
same torch, and the Python tests. A CUDA toolkit is hidden from all that (root only may do that),
and shown once: the library with NCCL is compiled, linked and loaded. Of two builds of one torch,
next to each other in the list, each also loads the wheel that was built with the other. Prints one
table. PyPI's builds of torch need CUDA's libraries, about 6 GB per environment: those of one minor
version are removed before the next unless --keep is given; what --keep left is used again.
`2.13.0` takes the CPU build where an index has one, `=2.13.0` PyPI's own. Logs are kept in the
folder.
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


# Runs a command in a mount namespace of its own, in which these folders are empty.
HIDE = 'for folder in $HIDDEN; do mount -t tmpfs none "$folder" || exit 1; done; exec "$@"'


class Failed(Exception):
    pass


def hiding_toolkits() -> dict[str, object]:
    """What a command starts with, and the variables it needs, so that it sees no CUDA toolkit."""
    folders = [str(path) for path in Path("/usr/local").glob("cuda*") if not path.is_symlink()]
    prefix = ["unshare", "--mount", "sh", "-c", HIDE, "sh"] if folders else []
    hiding = {"prefix": prefix, "variables": {"HIDDEN": " ".join(folders), "CUDA_HOME": ""}}
    if subprocess.run([*prefix, "true"], env={**os.environ, **hiding["variables"]}).returncode != 0:
        raise SystemExit(f"expected to hide {' and '.join(folders)}, which takes root's rights")
    return hiding


@dataclasses.dataclass
class Row:
    version: str
    torch: str = ""
    built: str = ""
    cpp: str = ""
    python: str = ""
    other: str = ""
    nccl: str = ""
    minutes: float = 0.0

    COLUMNS = (
        "torch",
        "build of torch",
        "`pip install .`",
        "C++ tests",
        "Python tests",
        "wheel of the other build",
        "NCCL",
    )

    def cells(self) -> tuple[str, ...]:
        version = self.version.lstrip("=")
        return version, self.torch, self.built, self.cpp, self.python, self.other, self.nccl


class Environment:
    """A virtual environment with one version of torch, and build folders."""

    def __init__(self, folder: Path, row: Row, limit: float):
        self.row, self.limit = row, limit
        self.folder = folder / row.version.replace("=", "pypi-")
        self.bin, self.build = self.folder / "venv" / "bin", self.folder / "build"
        self.log = folder / f"{self.folder.name}.log"
        self.hiding = hiding_toolkits()

    def run(self, what: str, *command: object, toolkit: bool = False) -> str:
        """What the command printed; raises Failed unless it succeeds."""
        print(f"torch {self.row.version}: {what} ...", file=sys.stderr, flush=True)
        variables = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "CXX": os.environ.get("CXX", "c++"),  # pip's builds would name another
            "SHARDSTEP_PYTHON": str(self.bin / "python"),
            **({} if toolkit else self.hiding["variables"]),
            "PYTHONDONTWRITEBYTECODE": "",  # torch takes twice as long to import without byte code
            "CCACHE_BASEDIR": str(ROOT),  # the three build folders compile nearly the same
        }
        result = subprocess.run(
            [*([] if toolkit else self.hiding["prefix"]), *(str(word) for word in command)],
            cwd=ROOT,
            env={**os.environ, **variables},
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

    def pip(self, what: str, *arguments: object) -> None:
        pip = (self.bin / "python", "-m", "pip", "--quiet", "--disable-pip-version-check")
        self.run(what, *pip, *arguments)

    def prepare(self) -> None:
        """All that needs the network, except what pip builds a wheel with."""
        self.log.unlink(missing_ok=True)
        constraint = self.folder / "constraint.txt"
        if not constraint.exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.run("making an environment", sys.executable, "-m", "venv", self.folder / "venv")
        torch = f"torch=={self.row.version}"
        build = ("ninja", "nlohmann_json==3.12.0")  # for the tests; pip brings its own
        self.pip("installing torch", "install", "--no-compile", torch, *build)
        # The version in the metadata, without the "+cu132" that torch.__version__ may add.
        ask = "from importlib.metadata import version; import torch; "
        ask += "print(version('torch'), torch.version.cuda or 'CPU')"
        version, cuda = self.run("asking torch", self.bin / "python", "-c", ask).split()[-2:]
        self.row.torch = "CPU" if cuda == "CPU" else f"CUDA {cuda}"
        # What the tests need depends on torch too, and must not bring another one.
        constraint.write_text(f"torch==={version}\n")
        requirements = (ROOT / "requirements" / f"{part}.txt" for part in ("python", "test"))
        lists = [word for path in requirements for word in ("-r", path)]
        said = "installing what the tests need"
        self.pip(said, "install", "--no-compile", "-c", constraint, *lists)

    def install(self) -> None:
        """What `pip install .` does, in two steps, because the wheel is tried elsewhere too."""
        wheels, build = self.folder / "wheel", self.folder / "pip-build"
        for folder in (wheels, build):
            shutil.rmtree(folder, ignore_errors=True)
        options = ("--no-deps", "--wheel-dir", wheels, "-C", f"build-dir={build}")
        self.pip("building a wheel", "wheel", *options, ROOT)
        self.install_wheel(self)
        self.row.built = "yes"

    def install_wheel(self, built_by: "Environment") -> None:
        (wheel,) = (built_by.folder / "wheel").glob("*.whl")
        self.pip("installing the wheel", "install", "--no-deps", "--force-reinstall", wheel)

    def try_wheel(self, built_by: "Environment") -> None:
        self.row.other = "failed"
        self.install_wheel(built_by)
        tests = [f"tests/python/zero/test_{name}.py" for name in ("parity", "surface", "stage2")]
        said = self.run(
            f"testing the wheel of {built_by.row.torch}",
            *(self.bin / "python", "-m", "pytest", "-q", "-n", 2, *tests),
        )
        self.row.other = self._sum([said.splitlines()[-1]])

    def configure(self, build: Path, toolkit: bool) -> str:
        """What CMake said. The library is compiled as pip does, so that ccache has it."""
        tools = (
            f"-DPython_EXECUTABLE={self.bin / 'python'}",
            f"-DCMAKE_MAKE_PROGRAM={self.bin / 'ninja'}",
        )
        options = ("-DSHARDSTEP_FAILURE_POINTS=OFF", "-DSHARDSTEP_BUILD_BENCHMARKS=OFF")
        cmake = ("cmake", "-S", ROOT, "-B", build, "-G", "Ninja", *tools, *options)
        return self.run("configuring", *cmake, toolkit=toolkit)

    def test(self, jobs: int) -> None:
        self.row.cpp = "failed"
        self.configure(self.build, toolkit=False)
        self.run("building the tests", self.bin / "ninja", "-C", self.build, "-j", jobs)
        command = (self.bin / "python", ROOT / "tools" / "run_tests.py", "--build", self.build)
        try:
            self.run("testing", *command, "--jobs", jobs, "--limit", self.limit / 2)
        except Failed as error:
            print(error, file=sys.stderr)
        said = self.log.read_text(errors="replace").rpartition("run_tests.py")[2]
        lines = re.findall(r"^(\w[^:\n]*): (.*) in \d+ s", said, re.M)
        self.row.python = self._sum(c for name, c in lines if name.startswith("pytest"))
        self.row.cpp = self._sum(c for name, c in lines if not name.startswith("pytest"))

    def try_nccl(self, jobs: int) -> None:
        """Compiles the library with NCCL, links it, and loads it where there may be no GPU."""
        build = self.folder / "nccl-build"
        said = self.configure(build, toolkit=True)
        without = re.search(r"shardstep: without NCCL \((.*?)[;)]", said)
        if without:
            self.row.nccl = without[1]
            return
        self.row.nccl = "failed"
        ninja = (self.bin / "ninja", "-C", build, "-j", jobs, "shardstep", "launch_test")
        self.run("building with NCCL", *ninja, toolkit=True)
        said = self.run("testing NCCL", build / "tests" / "launch_test", "--gtest_filter=*Nccl*")
        if "[  PASSED  ] 2 tests" in said:
            self.build_consumer(build)
            self.row.nccl = "compiled, links, loads"

    def build_consumer(self, build: Path) -> None:
        """Builds and runs a program that finds the library where no toolkit is."""
        prefix, consumer = build / "prefix", build / "consumer"
        install = ("cmake", "--install", build, "--component", "shardstep", "--prefix", prefix)
        self.run("installing the library", *install)
        options = (f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCMAKE_MAKE_PROGRAM={self.bin / 'ninja'}")
        self.run(
            "building a program with the library",
            *("ctest", "--build-and-test", ROOT / "tests" / "consumer", consumer),
            *("--build-generator", "Ninja", "--build-options", *options),
            *("--test-command", consumer / "consumer"),
        )

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
        environment.install()
        environment.test(jobs)
        environment.try_nccl(jobs)
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


def run_minor(environments: list[Environment], jobs: int, keep: bool) -> None:
    for environment in environments:
        run_version(environment, jobs)
    try_wheels(environments)
    if not keep:
        for environment in environments:
            shutil.rmtree(environment.folder, ignore_errors=True)


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
    parser.add_argument("--download", action="store_true", help="only prepare environments")
    parser.add_argument("--limit", type=float, default=3600, help="seconds per command")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    environments = [
        Environment(arguments.folder.resolve(), Row(version), arguments.limit)
        for version in arguments.versions
    ]
    if arguments.download:
        for environment in environments:
            environment.prepare()
        return 0
    for _, of_one_minor in itertools.groupby(environments, lambda e: minor_of(e.row.version)):
        run_minor(list(of_one_minor), arguments.jobs, arguments.keep)
    rows = [environment.row for environment in environments]
    print(f"| {' | '.join(Row.COLUMNS)} |\n|{'---|' * len(Row.COLUMNS)}")
    for row in rows:
        print(f"| {' | '.join(row.cells())} |")
        print(f"torch {row.version}: {row.minutes:.0f} min", file=sys.stderr)
    good = all("failed" not in " ".join(row.cells()) and row.python for row in rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
