"""Runs the C++ and the Python tests and ends with one line: N passed, N failed, N skipped.

Each C++ binary runs in one process (loading libtorch takes 2 s), long ones in several shards. What
fails is printed; everything else goes into the JUnit reports in the build folder.
"""

import argparse
import collections
import concurrent.futures
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Binaries that take long on one core, and into how many processes they are divided.
SHARDS = {"zero_test": 4, "checkpoint_crash_test": 2, "checkpoint_test": 2, "ddp_test": 2}
TIME_LIMIT = 900  # seconds for one process of tests; each wait inside has a limit of its own


class Results:
    """Outcomes of JUnit reports, printed as they come."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.slowest: list[tuple[float, str]] = []

    def add(self, name: str, report: Path, code: int, output: str, seconds: float) -> None:
        """Counts what a report says; a runner that failed without a report is one failure."""
        counts: collections.Counter[str] = collections.Counter()
        if report.exists():
            for case in ElementTree.parse(report).iter("testcase"):
                counts[self._outcome(case)] += 1
        if counts.total() == 0 or (code != 0 and counts["failed"] == 0):
            print(f"{name} itself failed: exit status {code}, {counts.total()} tests reported")
            counts["failed"] += 1
        if counts["failed"]:
            print(output, flush=True)
        tally = ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
        print(f"{name}: {tally} in {seconds:.0f} s", flush=True)
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


def run(command: list[str], report: Path, environment: dict[str, str]) -> tuple[int, str, float]:
    report.unlink(missing_ok=True)
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            timeout=TIME_LIMIT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as expired:
        output = expired.output or b""
        output = output.decode(errors="replace") if isinstance(output, bytes) else output
        code, output = -1, f"{output}\n{command[0]} did not end within {TIME_LIMIT} s"
    return code, output, time.monotonic() - began


def cpp_jobs(build: Path, reports: Path, environment: dict[str, str], only: str | None):
    """One job per process: its name, command, report and environment. Long ones come first."""
    binaries = sorted((build / "tests").glob("*_test"), key=lambda b: -SHARDS.get(b.name, 1))
    for binary in binaries:
        shards = SHARDS.get(binary.name, 1)
        for shard in range(shards):
            name = binary.name if shards == 1 else f"{binary.name}[{shard + 1}/{shards}]"
            report = reports / f"{binary.name}-{shard}.xml"
            command = [str(binary), f"--gtest_output=xml:{report}"]
            if only:
                command.append(f"--gtest_filter={only}")
            index = {"GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(shard)}
            yield name, command, report, {**environment, **index}


def run_cpp(results: Results, build: Path, environment: dict[str, str], arguments) -> None:
    reports = build / "reports"
    reports.mkdir(exist_ok=True)
    jobs = list(cpp_jobs(build, reports, environment, arguments.gtest_filter))
    if not jobs:
        print(f"expected test binaries in {build}/tests, got none: build them first (make build)")
        results.counts["failed"] += 1
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        futures = {pool.submit(run, job[1], job[2], job[3]): job for job in jobs}
        for future in concurrent.futures.as_completed(futures):
            name, _, report, _ = futures[future]
            code, output, seconds = future.result()
            results.add(name, report, code, output, seconds)


def run_package(results: Results, build: Path, environment: dict[str, str]) -> None:
    """Headers that stand alone, and the installed tree that others link: CMake's own tests."""
    report = build / "reports" / "package.xml"
    ctest = ["ctest", "--test-dir", str(build), "--output-on-failure", "--output-junit"]
    results.add("package", report, *run([*ctest, str(report)], report, environment))


def run_python(results: Results, build: Path, environment: dict[str, str], jobs: int) -> None:
    report = build / "reports" / "pytest.xml"
    # One more than processors: ranks wait for each other a good part of the time.
    pytest = [sys.executable, "-m", "pytest", "tests/python", f"--junitxml={report}"]
    pytest += ["-q", "-n", str(jobs + 1), "--dist", "loadfile"]
    results.add("pytest", report, *run(pytest, report, environment))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cpp-only", action="store_true", help="no Python and package tests")
    parser.add_argument("--gtest-filter", help="run only these C++ tests")
    parser.add_argument("--slowest", type=int, default=0, metavar="N", help="list the slowest N")
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "SHARDSTEP_BUILD_DIR": str(build),
        "GTEST_COLOR": "no",
    }
    results = Results()
    run_cpp(results, build, environment, arguments)
    if not arguments.cpp_only:
        run_package(results, build, environment)
        run_python(results, build, environment, arguments.jobs)
    for seconds, name in sorted(results.slowest, reverse=True)[: arguments.slowest]:
        print(f"{seconds:7.2f} s  {name}")
    counts = results.counts
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
