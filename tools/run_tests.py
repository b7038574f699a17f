"""Runs the C++, package and Python tests; ends with one line: N passed, N failed, N skipped.

Each C++ binary runs in one process (loading libtorch takes 2 s), long ones in several shards. What
fails is printed; everything else goes into the JUnit reports in the build folder, and into logs
beside them, which grow during the run. A short run takes a part of the long matrices, chosen by a
seed; SHARDSTEP_FULL=1 (`make test FULL=1`) takes all. Tests that run on ranks also run on a
simulated device (tests/sim_device): some of Python's in a short run, all in a full one, and with
--device=sim (`make test DEVICE=sim`) they alone.
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

# Into how many processes the slow binaries are divided, the slowest first.
SHARDS = {"zero_test": 4, "checkpoint_crash_test": 2, "checkpoint_test": 2, "ddp_test": 2}
# What the sanitizers are told at run time; the rest stands in cmake/ShardstepSanitize.cmake.
SANITIZERS = {
    "address": {},
    # libtorch is not instrumented: its locks are seen, but not its atomics, so what it does to
    # memory is not judged. Nothing of ours is suppressed; what is stands in
    # tests/cpp/support/test_support.cpp.
    "thread": {
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=0:exitcode=66:"
        "detect_deadlocks=0:report_signal_unsafe=0:history_size=4"
    },
}
TIME_LIMIT = 7200 if FULL else 900  # seconds per process; each wait inside has its own limit
# How many times longer tests may take: all limits are multiplied by it (patience() in
# tests/cpp/support/full_run.h). SHARDSTEP_PATIENCE overrides it, on a machine with other work.
PATIENCE = {"address": 3, "thread": 10}
# TSAN makes these ten times slower, so that a short run takes one of so many cases of each suite.
THREAD_SAMPLE = {"zero_test": 3, "ddp_test": 2}


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
    _process: subprocess.Popen[bytes] | None = None

    def run(self, limit: float) -> "Job":
        self.report.unlink(missing_ok=True)
        began = time.monotonic()
        log = self.report.with_suffix(".log")
        with open(log, "w") as output:
            self._process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env={**os.environ, **self.variables},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # what it starts is killed with it
            )
        too_long = ""
        try:
            self._process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
            too_long = f"\n{self.name} did not end within {limit:.0f} s"
        self.output = log.read_text(errors="replace") + too_long
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
        """Counts the outcomes in a report; a job that failed without reporting is one failure."""
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

    def conclude(self, slowest: int) -> int:
        """Prints the last lines; returns the exit status."""
        for seconds, name in sorted(self.slowest, reverse=True)[:slowest]:
            print(f"{seconds:7.2f} s  {name}")
        counts = self.counts
        print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
        return 1 if counts["failed"] else 0

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


def sampled_filter(binary: Path, one_of: int) -> str:
    """For GoogleTest: one of so many cases of each suite, at least one, chosen by the seed."""
    listed = subprocess.run(
        [binary, "--gtest_list_tests"], check=True, capture_output=True, text=True
    )
    suites: dict[str, list[str]] = {}
    for line in listed.stdout.splitlines():
        name = line.partition("#")[0].rstrip()
        if name.endswith("."):
            suites[name] = []
        elif name.startswith("  ") and suites:
            suites[[*suites][-1]].append([*suites][-1] + name.strip())
    choice = random.Random(os.environ["SHARDSTEP_SEED"])
    chosen = [
        case for cases in suites.values() for case in choice.sample(cases, -(-len(cases) // one_of))
    ]
    print(f"left to FULL=1: {sum(map(len, suites.values())) - len(chosen)} cases of {binary.name}")
    return ":".join(chosen)


def binary_jobs(binary: Path, reports: Path, only: str | None, device: str = "cpu") -> list[Job]:
    """The shards of a binary."""
    jobs = []
    shards = SHARDS.get(binary.name, 1)
    where = "" if device == "cpu" else f" on {device}"
    for shard in range(shards):
        name = binary.name if shards == 1 else f"{binary.name}[{shard + 1}/{shards}]"
        report = reports / f"{binary.name}{where.replace(' ', '-')}-{shard}.xml"
        command = [str(binary), f"--gtest_output=xml:{report}"]
        if only:
            command.append(f"--gtest_filter={only}")
        index = {"GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(shard)}
        variables = {**index, "SHARDSTEP_TEST_DEVICE": device}
        jobs.append(Job(f"{name}{where}", command, report, variables))
    return jobs


def cpp_jobs(build: Path, reports: Path, arguments: argparse.Namespace) -> list[Job]:
    jobs = []
    for binary in (build / "tests").glob(f"{arguments.layer}*_test"):
        only = arguments.gtest_filter
        one_of = THREAD_SAMPLE.get(binary.name, 1) if arguments.sanitizer == "thread" else 1
        if one_of > 1 and not only and not FULL:
            only = sampled_filter(binary, one_of)
        jobs += binary_jobs(binary, reports, only)
    # A long job that starts last would leave the other processors idle.
    order = [*SHARDS, ""]
    return sorted(jobs, key=lambda job: order.index(next(n for n in order if n in job.name)))


def package_job(build: Path, reports: Path) -> Job:
    """CMake's own tests: headers that compile alone, and programs that link the installed tree."""
    report = reports / "package.xml"
    ctest = ["ctest", "--test-dir", str(build), "--output-on-failure", "--output-junit"]
    return Job("package", [*ctest, str(report)], report)


def python_job(reports: Path, jobs: int) -> Job:
    report = reports / "pytest.xml"
    pytest = [sys.executable, "-m", "pytest", "tests/python", f"--junitxml={report}"]
    return Job("pytest", [*pytest, "-q", "-n", str(jobs + 1), "--dist", "loadgroup"], report)


# Tests that run on ranks; the others are the same on every device.
DEVICE_TESTS = ["zero", "traps"]
DEVICE_SUITES = {
    "zero_test": "ZeroStep*:Stage2.*:Stage2Hosts.*:*/Stage2*Test.*:ZeroHooks*:ZeroState.*",
    "ddp_test": "*",
    "comm_test": "*ExchangeTest*",
}
DEVICE_SAMPLE = 24  # in a short run


def device_jobs(build: Path, reports: Path, jobs: int, device: str) -> list[Job]:
    """All that runs on this device."""
    cpp = [
        job
        for name, only in DEVICE_SUITES.items()
        for job in binary_jobs(build / "tests" / name, reports, only, device)
    ]
    return [device_job(reports, jobs, device, None), *cpp]


def device_job(reports: Path, jobs: int, device: str, sample: int | None) -> Job:
    report = reports / f"pytest-{device}.xml"
    folders = [f"tests/python/{folder}" for folder in DEVICE_TESTS]
    pytest = [sys.executable, "-m", "pytest", *folders, f"--junitxml={report}", "-q"]
    if sample is not None:
        pytest.append(f"--sample={sample}")
    workers = ["-n", str(jobs + 1 if sample is None else 1), "--dist", "loadgroup"]
    variables = {"SHARDSTEP_TEST_DEVICE": device}
    return Job(f"pytest on {device}", [*pytest, *workers], report, variables)


def run_all(jobs: list[Job], at_once: int, limit: float, results: Results) -> None:
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        running = [pool.submit(job.run, limit) for job in jobs]
        try:
            for future in concurrent.futures.as_completed(running):
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
    parser.add_argument(
        "--device", default="cpu", help="only tests that run on ranks, on this device"
    )
    parser.add_argument("--layer", default="", help="run only the C++ tests of this layer of src/")
    parser.add_argument("--gtest-filter", help="run only these C++ tests")
    parser.add_argument("--sanitizer", choices=SANITIZERS, help="what the binaries are built with")
    parser.add_argument("--limit", type=float, default=TIME_LIMIT, help="seconds per process")
    parser.add_argument("--slowest", type=int, default=0, metavar="N", help="list the slowest N")
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    reports = build / "reports"
    reports.mkdir(parents=True, exist_ok=True)
    seed = os.environ.setdefault("SHARDSTEP_SEED", str(random.randrange(1 << 31)))
    os.environ.update(SANITIZERS.get(arguments.sanitizer, {}))
    os.environ.setdefault("SHARDSTEP_PATIENCE", str(PATIENCE.get(arguments.sanitizer, 1)))
    arguments.limit *= int(os.environ["SHARDSTEP_PATIENCE"])
    os.environ.update(OMP_NUM_THREADS="1", SHARDSTEP_BUILD_DIR=str(build), GTEST_COLOR="no")
    print(f"{'all tests' if FULL else 'a short run'}; SHARDSTEP_SEED={seed} repeats its choices")
    print(f"to look on: tail -f {os.path.relpath(reports)}/*.log", flush=True)

    results = Results()
    if arguments.device != "cpu":
        jobs = device_jobs(build, reports, arguments.jobs, arguments.device)
        run_all(jobs, arguments.jobs, arguments.limit, results)
        return results.conclude(arguments.slowest)
    with_python = not arguments.cpp_only and not arguments.layer
    jobs = cpp_jobs(build, reports, arguments)
    if not jobs:
        print(f"expected test binaries in {build}/tests, got none; build them first (make build)")
        results.counts["failed"] += 1
    if with_python:
        jobs = [
            python_job(reports, arguments.jobs),
            package_job(build, reports),
            *(
                device_jobs(build, reports, arguments.jobs, "sim")
                if FULL
                else [device_job(reports, arguments.jobs, "sim", DEVICE_SAMPLE)]
            ),
            *jobs,
        ]
    # More jobs than processors, because ranks often wait for each other; pytest has workers of its
    # own.
    at_once = arguments.jobs + 1 if with_python else 2 * arguments.jobs
    run_all(jobs, at_once, arguments.limit, results)
    return results.conclude(arguments.slowest)


if __name__ == "__main__":
    sys.exit(main())
