"""Runs ctest and pytest and ends with one line: N passed, N failed, N skipped."""

import argparse
import collections
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def outcome(case: ElementTree.Element) -> tuple[str, str]:
    """The outcome of a JUnit test case, and the reason of a skip."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed", ""
    skipped = case.find("skipped")
    if skipped is None and case.get("status") not in ("notrun", "disabled"):
        return "passed", ""
    reason = skipped.get("message", "") if skipped is not None else "disabled"
    if reason == "SKIP_REGULAR_EXPRESSION_MATCHED":  # ctest's; gtest printed the reason
        lines = (case.findtext("system-out") or "").splitlines()
        at = next((i for i, line in enumerate(lines) if line.endswith(": Skipped")), None)
        reason = lines[at + 1] if at is not None and at + 1 < len(lines) else reason
    return "skipped", reason.strip()


def run(name: str, command: list[str], report: Path, environment: dict[str, str]):
    """Runs a test runner that writes a JUnit report, and counts what the report says."""
    print(f"== {name}", flush=True)
    report.unlink(missing_ok=True)
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    counts = collections.Counter()
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            result, reason = outcome(case)
            counts[result] += 1
            if result == "skipped":
                print(f"skipped: {case.get('classname')}.{case.get('name')}: {reason}")
    if counts.total() == 0 or (code != 0 and counts["failed"] == 0):
        print(f"{name} itself failed: exit status {code}, {counts.total()} tests reported")
        counts["failed"] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cpp-only", action="store_true")
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "SHARDSTEP_BUILD_DIR": str(build),
        "GTEST_COLOR": "no",
    }

    ctest = ["ctest", "--test-dir", str(build), "--output-on-failure", "-j", str(arguments.jobs)]
    report = build / "ctest.xml"
    counts = run("ctest", [*ctest, "--output-junit", str(report)], report, environment)
    if not arguments.cpp_only:
        report = build / "pytest.xml"
        # One more than processors: ranks wait for each other a good part of the time.
        side_by_side = ["-n", str(arguments.jobs + 1), "--dist", "loadfile"]
        pytest = [sys.executable, "-m", "pytest", "tests/python", f"--junitxml={report}"]
        pytest += side_by_side
        counts += run("pytest", pytest, report, environment)

    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
