"""README's programs do what it says. A comment before a fenced block says what the block is:

<!-- test: file train.py -->                 is saved under this name
<!-- test: same as examples/train_ddp.cpp --> is that file, which the build compiles
<!-- test: run -->                           shell commands, run where the files were saved
<!-- test: prints -->                        lines that the last run printed, any numbers
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from test_train_ddp import LAUNCHER_VARIABLES

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^<!-- test: ([^\n]+?) -->\n+```(\w+)\n(.*?)^```$", README, re.M | re.S)
NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")


def test_every_mark_stands_before_a_block():
    assert len(re.findall(r"^<!-- test:", README, re.M)) == len(BLOCKS)


def test_both_quick_starts_are_whole_programs():
    languages = {language for what, language, _ in BLOCKS if what.startswith(("file", "same as"))}
    assert {"python", "cpp"} <= languages


def test_a_block_shows_the_whole_file():
    shown = [(what.removeprefix("same as "), block) for what, _, block in BLOCKS]
    for name, block in shown:
        if (ROOT / name).is_file():
            text = (ROOT / name).read_text()
            assert text.endswith(block), f"{name} is not what README shows"
            assert text.removesuffix(block).strip().startswith("//"), "it shows more"


def shell(commands: str, folder: Path) -> str:
    variables = {k: v for k, v in os.environ.items() if not LAUNCHER_VARIABLES.match(k)}
    variables["PATH"] = f"{Path(sys.executable).parent}:{variables['PATH']}"
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, f"{commands}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def test_it_runs_as_printed(tmp_path):
    printed = ""
    for what, _, block in BLOCKS:
        if what.startswith("file "):
            (tmp_path / what.removeprefix("file ")).write_text(block)
        elif what == "run":
            printed = shell(block, tmp_path)
        elif what == "prints":
            lines = [NUMBER.sub("#", line).rstrip() for line in printed.splitlines()]
            for line in block.splitlines():
                assert NUMBER.sub("#", line).rstrip() in lines, f"{line!r} is not in:\n{printed}"
        else:
            assert what.startswith("same as "), f"unknown mark: {what}"
            assert (ROOT / what.removeprefix("same as ")).is_file(), what
