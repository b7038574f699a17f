"""Checks that public headers stand alone: each is compiled by itself, and included twice.

A short run takes one of them, chosen by SHARDSTEP_SEED; SHARDSTEP_FULL=1 takes all.
"""

import concurrent.futures
import os
import random
import subprocess
import sys
from pathlib import Path


def compile_alone(command: list[str], header: str) -> str:
    source = f'#include "{header}"\n#include "{header}"\n'
    result = subprocess.run(
        [*command, "-fsyntax-only", "-x", "c++", "-"],
        input=source,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return f"{header}:\n{result.stderr}" if result.returncode else ""


def main() -> int:
    """Arguments: the folder of the headers, then the compiler and its options."""
    folder, command = Path(sys.argv[1]), sys.argv[2:]
    headers = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.h"))
    if os.environ.get("SHARDSTEP_FULL", "") in ("", "0"):
        seed = int(os.environ.get("SHARDSTEP_SEED") or random.randrange(1 << 31))
        headers = [random.Random(seed).choice(headers)]
        print(f"SHARDSTEP_SEED={seed} chose {headers[0]}")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        problems = [text for text in pool.map(lambda h: compile_alone(command, h), headers) if text]
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
