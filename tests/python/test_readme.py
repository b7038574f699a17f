"""README's programs run as printed. A comment before a block says what the block is:

    <!-- test: python, 2 ranks -->                       a whole program
    <!-- test: cpp, same as examples/train_ddp.cpp -->   that file, which the build compiles

A block without a language that follows it is a session: a command and what it prints, where any
number stands for any other.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_train_ddp import BUILD, LAUNCHER_VARIABLES

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCK = r"^```{}\n(.*?)^```$"
NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")


def programs(mark: str, language: str) -> list[tuple[str, str, str]]:
    """What the mark says, the program, and the session that follows it if there is one."""
    found = []
    for match in re.finditer(
        rf"^<!-- test: {mark} -->\n" + BLOCK.format(language), README, re.M | re.S
    ):
        rest = re.split(r"^(?:<!-- test:|## )", README[match.end() :], maxsplit=1, flags=re.M)[0]
        session = re.search(r"^```\n(\$ .*?)^```$", rest, re.M | re.S)
        found.append((match[1], match[2], session[1] if session else ""))
    return found


PYTHON = programs(r"python, (\d+) ranks", "python")
CPP = programs("cpp, same as (.*?)", "cpp")


def test_every_mark_is_understood():
    assert README.count("<!-- test:") == len(PYTHON) + len(CPP)
    assert PYTHON and CPP


def run_session(session: str, folder: Path) -> None:
    command, _, expected = session.removeprefix("$ ").partition("\n")
    variables = {k: v for k, v in os.environ.items() if not LAUNCHER_VARIABLES.match(k)}
    variables["PATH"] = f"{Path(sys.executable).parent}:{variables['PATH']}"
    variables["PET_STANDALONE"] = "1"  # torchrun: a free port
    variables["OMP_NUM_THREADS"] = "1"
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    printed = NUMBER.sub("#", result.stdout).splitlines()
    assert printed, "a program that shows nothing convinces nobody"
    if expected:
        assert printed == NUMBER.sub("#", expected).splitlines(), result.stdout


@pytest.mark.parametrize("ranks, program, session", PYTHON, ids=range(len(PYTHON)))
def test_python(ranks, program, session, tmp_path):
    session = session or f"$ torchrun --nproc-per-node {ranks} train.py\n"
    (name,) = re.findall(r"\w+\.py", session.partition("\n")[0])
    (tmp_path / name).write_text(program)
    run_session(session, tmp_path)


@pytest.mark.parametrize("path, program, session", CPP, ids=range(len(CPP)))
def test_cpp(path, program, session, tmp_path):
    text = (ROOT / path).read_text()
    assert text.endswith(program), f"README does not show {path} as it is"
    assert not re.sub(r"^//.*$", "", text.removesuffix(program), flags=re.M).strip()
    (tmp_path / "program").symlink_to(BUILD / Path(path).with_suffix(""))
    run_session(session, tmp_path)
