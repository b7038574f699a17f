"""Fuzzes the readers of what others wrote (tests/cpp/fuzz/targets.h), for some CPU time each.

Each target starts from its seeds, from the inputs in tests/cpp/fuzz/corpus, and from what earlier
runs have left in the build folder. At the end it prints how many inputs were tried, the edges that
were reached, and the share of the readers' lines that the corpus covers. An input that is neither
read nor refused as it should be is left in build-fuzz/found; then the exit status is 1.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "tests" / "cpp" / "fuzz" / "corpus"
LONGEST = {"index": 8192, "shard": 8192, "pickle": 2048, "state_dict": 8192, "environment": 512}
# Beyond these an input counts as found.
LIMITS = ["-rss_limit_mb=3000", "-malloc_limit_mb=256", "-timeout=120"]
# The sources whose coverage is reported; the rest only writes, or needs ranks.
READERS = {
    "index": ["format/json.cpp", "checkpoint/checkpoint_index.cpp", "checkpoint/checkpoint.cpp"],
    "shard": ["checkpoint/checkpoint_index.cpp", "checkpoint/checkpoint_files.cpp"],
    "pickle": ["format/pickle_reader.cpp", "format/state_dict.cpp"],
    "state_dict": ["format/zip_file.cpp", "format/pickle_reader.cpp", "format/state_dict.cpp"],
    "environment": ["launch/launch_environment.cpp"],
}


def cpu_seconds(pid: int) -> float:
    """What a running process and the children that it has waited for have used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Fuzzer:
    """One target: its program, and its folders."""

    def __init__(self, build: Path, target: str) -> None:
        self.target = target
        self.program = build / "tests/cpp/fuzz/shardstep_fuzzer"
        self.build = build
        self.corpus = build / "corpus" / target
        self.found = build / "found" / target
        self.log = build / f"{target}.log"
        # Each input is written to a file.
        memory = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp")
        self.memory = memory / f"fuzz-{os.getpid()}-{target}"
        for folder in (self.corpus, self.found, KEPT / target, self.memory):
            folder.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        shutil.rmtree(self.memory)

    def variables(self, profile: str = "/dev/null") -> dict[str, str]:
        return {
            **os.environ,
            "SHARDSTEP_FUZZ_TARGET": self.target,
            "SHARDSTEP_FUZZ_SEEDS": str(self.corpus),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.memory),
            "LLVM_PROFILE_FILE": profile,
            # Torch keeps what it registers for the life of the process.
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        }

    def start(self) -> subprocess.Popen[bytes]:
        options = [
            f"-max_len={LONGEST[self.target]}",
            f"-artifact_prefix={self.found}/",
            *LIMITS,
            "-report_slow_units=120",
            "-print_final_stats=1",
        ]
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                [self.program, *options, self.corpus, KEPT / self.target],
                env=self.variables(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def retry_found(self) -> None:
        """Moves what an earlier run found, and is mended by now, to the corpus."""
        for path in sorted(self.found.iterdir()):
            command = [self.program, *LIMITS, f"-artifact_prefix={self.memory}/", path]
            again = subprocess.run(command, env=self.variables(), capture_output=True)
            if again.returncode == 0:
                path.rename(self.corpus / path.name)
                print(f"{self.target}: {path.name} of an earlier run is read or refused now")

    def run(self, seconds: float) -> bool:
        """Fuzzes for some seconds of CPU; whether nothing was found."""
        self.retry_found()
        self.log.write_bytes(b"")
        process = self.start()
        used = 0.0
        try:
            while process.poll() is None:
                used = max(used, cpu_seconds(process.pid))
                if used >= seconds:
                    process.send_signal(signal.SIGINT)
                    process.wait(timeout=60)
                    break
                time.sleep(0.5)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        self.report(used)
        return used >= seconds and not any(self.found.iterdir())

    def report(self, used: float) -> None:
        text = self.log.read_text(errors="replace")
        runs = re.findall(r"^#(\d+)\t", text, re.M)
        edges = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", text)
        tried = re.search(r"stat::number_of_executed_units: (\d+)", text)
        count = tried[1] if tried else (runs[-1] if runs else "0")
        cov, features, corpus = edges[-1] if edges else ("0", "0", "0")
        print(
            f"{self.target}: {count} inputs in {used:.0f} s of CPU, {cov} edges, "
            f"{features} features, {corpus} inputs kept"
        )
        for path in sorted(self.found.iterdir()):
            print(f"  found {path}; {self.log} says what happened")
        sys.stdout.flush()

    def edges(self) -> dict[Path, set[int]]:
        """What each input of both corpora reaches, from libFuzzer's merge."""
        control, merged = self.memory / "control", self.memory / "merged"
        merged.mkdir()
        options = ["-merge=1", f"-merge_control_file={control}"]
        command = [self.program, *options, merged, KEPT / self.target, self.corpus]
        subprocess.run(command, env=self.variables(), check=True, capture_output=True)
        lines = control.read_text().splitlines()
        names = lines[2 : 2 + int(lines[0])]
        words = [line.split() for line in lines if line.startswith("FT ")]
        # A feature is an edge and how often it was taken, in eight steps.
        return {Path(names[int(file)]): {int(f) >> 3 for f in found} for _, file, *found in words}

    def reduce(self, most: int) -> None:
        """Keeps in the tests few inputs that together reach nearly all edges."""
        reached = self.edges()
        everything = set().union(*reached.values())
        chosen: list[Path] = []
        left = set(everything)
        while left and len(chosen) < most:
            best = max(reached, key=lambda path: (len(reached[path] & left), -path.stat().st_size))
            chosen.append(best)
            left -= reached.pop(best)
        contents = {path.name[:16]: path.read_bytes() for path in chosen}
        kept = KEPT / self.target
        for path in kept.iterdir():
            if not path.name.startswith("defect-"):  # these once were found, and stay
                path.unlink()
        for name, content in contents.items():
            (kept / name).write_bytes(content)
        print(
            f"{self.target}: {len(contents)} of {len(contents) + len(reached)} inputs kept, which "
            f"reach {len(everything) - len(left)} of {len(everything)} edges"
        )

    def coverage(self) -> None:
        """Prints the share of the readers' lines that the corpus covers."""
        profile = self.build / f"{self.target}.profraw"
        data = profile.with_suffix(".profdata")
        quiet = f"-artifact_prefix={self.memory}/"
        command = [self.program, "-runs=0", quiet, self.corpus, KEPT / self.target]
        subprocess.run(command, env=self.variables(str(profile)), check=True, capture_output=True)
        subprocess.run(["llvm-profdata", "merge", profile, "-o", data], check=True)
        exported = subprocess.run(
            ["llvm-cov", "export", "-summary-only", f"-instr-profile={data}", self.program],
            check=True,
            capture_output=True,
        )
        for file in json.loads(exported.stdout)["data"][0]["files"]:
            name = os.path.relpath(file["filename"], ROOT / "src")
            if name not in READERS[self.target]:
                continue
            lines, branches = file["summary"]["lines"], file["summary"]["branches"]
            print(
                f"  {name}: {lines['covered']} of {lines['count']} lines, "
                f"{branches['covered']} of {branches['count']} branches"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build-fuzz")
    parser.add_argument("--seconds", type=float, default=60, help="of CPU time per target")
    parser.add_argument("--target", choices=[*LONGEST], action="append", help="only this one")
    parser.add_argument("--reduce", type=int, metavar="N", help="then keep N inputs in the tests")
    arguments = parser.parse_args()
    good = True
    for target in arguments.target or LONGEST:
        fuzzer = Fuzzer(arguments.build.resolve(), target)
        try:
            if arguments.seconds > 0:
                good = fuzzer.run(arguments.seconds) and good
            if arguments.reduce:
                fuzzer.reduce(arguments.reduce)
            fuzzer.coverage()
        finally:
            fuzzer.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
