"""Runs the C++, package and Python tests; ends with one line: N passed, N failed, N skipped.

Each C++ binary runs in one process (loading libtorch takes 2 s), long ones in several shards. What
fails is printed; everything else goes into the JUnit reports in the build folder. A short run takes
a part of the long matrices, chosen by a seed; SHARDSTEP_FULL=1 (`make test FULL=1`) takes all.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FULL = os.environ.get("SHARDSTEP_FULL", "") not in ("", "0")

# Into how many processes the binaries that take long are divided, the longest first.
SHARDS = {"zero_test": 4, "checkpoint_crash_test": 2, "checkpoint_test": 2, "ddp_test": 2}
TIME_LIMIT = 3600 if FULL else 900  # seconds per process; each wait inside has a limit of its own


@dataclasses.dataclass
class Job:
    """A process that runs tests and writes a JUnit report."""

    name: str
    command: list[str]
    report: Path
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    code: int = 0
    output: str = ""
    seconds: float = 0.0
    _process: subprocess.Popen[str] | None = None

    def run(self) -> "Job":
        self.report.unlink(missing_ok=True)
        began = time.monotonic()
        self._process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            env={**os.environ, **self.variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # what it starts is killed with it
        )
        try:
            self.output, _ = self._process.communicate(timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            self.kill()
            self.output, _ = self._process.communicate()
            self.output += f"\n{self.name} did not end within {TIME_LIMIT} s"
        self.code, self.seconds = self._process.returncode, time.monotonic() - began
        return self

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)


class Results:
    """Outcomes of JUnit reports, printed as they come."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.slowest: list[tuple[float, str]] = []

    def add(self, job: Job) -> None:
        """Counts what a report says; a job that failed without saying so is one failure."""
        counts: collections.Counter[str] = collections.Counter()
        if job.report.exists():
            for case in ElementTree.parse(job.report).iter("testcase"):
                counts[self._outcome(case)] += 1
        if counts.total() == 0 or (job.code != 0 and counts["failed"] == 0):
            print(f"{job.name} itself failed: exit status {job.code}, {counts.total()} tests ran")
            counts["failed"] += 1
        if counts["failed"]:
            print(job.output, flush=True)
        tally = ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
        left = re.search(r"^left to FULL=1: .*$", job.output, re.M)
        note = f"; {left[0]}" if left else ""
        print(f"{job.name}: {tally} in {job.seconds:.0f} s{note}", flush=True)
        self.counts += counts

    def _outcome(self, case: ElementTree.Element) -> str:
        name = f"{case.get('classname')}.{case.get('name')}"
        self.slowest.append((float(case.get("time") or 0), name))
        if case.find("failure") is not None or case.find("error") is not None:
            return "failed"
        skipped = case.find("skipped")
        if skipped is None and case.get("status") not in ("notrun", "disabled"):
            return "passed"
        reason = skipped.get("message", "") if skipped is not None else "disabled"
        print(f"skipped: {name}: {reason.strip().splitlines()[-1] if reason.strip() else ''}")
        return "skipped"


def cpp_jobs(build: Path, reports: Path, only: str | None) -> list[Job]:
    jobs = []
    for binary in (build / "tests").glob("*_test"):
        shards = SHARDS.get(binary.name, 1)
        for shard in range(shards):
            name = binary.name if shards == 1 else f"{binary.name}[{shard + 1}/{shards}]"
            report = reports / f"{binary.name}-{shard}.xml"
            command = [str(binary), f"--gtest_output=xml:{report}"]
            if only:
                command.append(f"--gtest_filter={only}")
            index = {"GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(shard)}
            jobs.append(Job(name, command, report, index))
    # A long one that starts last would leave the other processors without work.
    order = [*SHARDS, ""]
    return sorted(jobs, key=lambda job: order.index(next(n for n in order if n in job.name)))


def package_job(build: Path, reports: Path) -> Job:
    """Headers that stand alone, and the installed tree that others link: CMake's own tests."""
    report = reports / "package.xml"
    ctest = ["ctest", "--test-dir", str(build), "--output-on-failure", "--output-junit"]
    return Job("package", [*ctest, str(report)], report)


def python_job(reports: Path, jobs: int) -> Job:
    report = reports / "pytest.xml"
    pytest = [sys.executable, "-m", "pytest", "tests/python", f"--junitxml={report}"]
    # One more than processors: ranks wait for each other a good part of the time.
    return Job("pytest", [*pytest, "-q", "-n", str(jobs + 1), "--dist", "loadgroup"], report)


def run_all(jobs: list[Job], at_once: int, results: Results) -> None:
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        try:
            for future in concurrent.futures.as_completed([pool.submit(job.run) for job in jobs]):
                results.add(future.result())
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for job in jobs:
                job.kill()
            raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cpp-only", action="store_true", help="no Python and package tests")
    parser.add_argument("--gtest-filter", help="run only these C++ tests")
    parser.add_argument("--slowest", type=int, default=0, metavar="N", help="list the slowest N")
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    reports = build / "reports"
    reports.mkdir(parents=True, exist_ok=True)
    seed = os.environ.setdefault("SHARDSTEP_SEED", str(random.randrange(1 << 31)))
    os.environ.update(OMP_NUM_THREADS="1", SHARDSTEP_BUILD_DIR=str(build), GTEST_COLOR="no")
    print(f"{'all tests' if FULL else 'a short run'}; SHARDSTEP_SEED={seed} repeats its choices")

    results = Results()
    jobs = cpp_jobs(build, reports, arguments.gtest_filter)
    if not jobs:
        print(f"expected test binaries in {build}/tests, got none: build them first (make build)")
        results.counts["failed"] += 1
    if not arguments.cpp_only:
        jobs.insert(1, package_job(build, reports))
    run_all(jobs, arguments.jobs, results)
    if not arguments.cpp_only:
        run_all([python_job(reports, arguments.jobs)], 1, results)

    for seconds, name in sorted(results.slowest, reverse=True)[: arguments.slowest]:
        print(f"{seconds:7.2f} s  {name}")
    counts = results.counts
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
