"""README.md and docs/ are true: each code block runs or compiles, and no link leads nowhere.

A short run runs README's whole programs; FULL=1 and `make docs` run every block. pages.py says how
blocks are marked.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import shardstep
from pages import GIVEN, PAGES, ROOT, Block, all_blocks, anchors, links
from ranks import run_ranks
from test_train_ddp import BUILD, LAUNCHER_VARIABLES

NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")
BLOCKS = all_blocks()
TIME_LIMIT = 300  # seconds per line of commands; each loads torch anew


def in_a_short_run(block: Block) -> bool:
    """README's whole programs."""
    return block.page.name == "README.md" and block.kind in ("python", "cpp") and not block.given


def marked(kind: str, **wanted: bool) -> list[object]:
    """Parameters for the blocks of a kind, of which most wait for a full run."""
    return [
        pytest.param(block, id=block.name, marks=() if in_a_short_run(block) else pytest.mark.full)
        for block in BLOCKS
        if block.kind == kind and all(bool(getattr(block, k)) == v for k, v in wanted.items())
    ]


# -- links and marks -------------------------------------------------------------------------------


def test_every_block_is_marked():
    known = {"python", "session", "sh", "cpp", "session of a program"}
    wrong = [
        f"{block.name}: {block.kind or 'no mark'}"
        for block in BLOCKS
        if not block.is_directive
        and block.kind not in known
        and not (block.kind == "not run" and block.reason)
    ]
    assert not wrong, "\n".join(wrong)
    assert len(BLOCKS) > 10


def test_python_blocks_are_python():
    for block in BLOCKS:
        if block.language == "python":
            compile(block.text, block.name, "exec")


def test_what_is_given_exists():
    for block in BLOCKS:
        suffix = "h" if block.kind == "cpp" else "py"
        assert not block.given or (GIVEN / f"{block.given}.{suffix}").exists(), block.name
    assert {b.given for b in BLOCKS if b.given} == {path.stem for path in GIVEN.glob("*.*")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    dead = []
    for link in links(page):
        path, _, name = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if re.match(r"\w+:", link):
            continue
        if not target.exists() or (name and name not in anchors(target)):
            dead.append(link)
    assert not dead, f"{page}: {dead}"


def test_the_api_of_python_is_complete():
    page = (ROOT / "docs/api/python.md").read_text()
    named = set(re.findall(r"shardstep\.(?:ZeroRedundancyOptimizer\.)?(\w+)$", page, re.M))
    methods = {
        name
        for base in shardstep.ZeroRedundancyOptimizer.__mro__
        if base.__module__.startswith("shardstep")
        for name, value in vars(base).items()
        if callable(value) and not name.startswith("_") and not name.startswith("join_")
    }
    public = {name for name in shardstep.__all__ if not name.startswith("_")}
    assert not (methods | public) - named


def test_the_api_of_cpp_is_complete():
    page = (ROOT / "docs/api/cpp.md").read_text()
    named = set(re.findall(r":: (?:shardstep::)(?:optim::)?(\w+)(?:\(.*\))?$", page, re.M))
    declared: set[str] = set()
    for header in (ROOT / "include").rglob("*.h"):
        text = re.sub(
            r"namespace detail \{.*?\}  // namespace detail", "", header.read_text(), flags=re.S
        )
        if "namespace shardstep::detail" in text:
            continue
        declared |= set(
            re.findall(r"^(?:class|struct|enum class)(?: SHARDSTEP_API)? (\w+)\b[^;]*$", text, re.M)
        )
        declared |= set(re.findall(r"^SHARDSTEP_API [\w:<>*]+ (\w+)\(", text, re.M))
    assert {"ZeroRedundancyOptimizer", "init_process_group"} <= declared
    assert not declared - named


# -- running ---------------------------------------------------------------------------------------


def shell(command: str, folder: Path) -> str:
    variables = {k: v for k, v in os.environ.items() if not LAUNCHER_VARIABLES.match(k)}
    variables["PATH"] = f"{Path(sys.executable).parent}:{variables['PATH']}"
    variables["PET_STANDALONE"] = "1"  # torchrun: a free port
    variables["OMP_NUM_THREADS"] = "1"
    # mpirun in a container.
    variables.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    variables.update(OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_orte_tmpdir_base=str(folder))
    limit = TIME_LIMIT * len(command.strip().splitlines())
    process = subprocess.Popen(
        ["bash", "-ec", command],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # ranks outlive a launcher that is killed
    )
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun, whose ranks have sessions of their own
        output, errors = process.communicate(timeout=60)
        raise AssertionError(f"not done in {limit} s: {command}\n{output}\n{errors}") from None
    assert process.returncode == 0, f"{command}\n{output}\n{errors}"
    return output


def same_but_for_numbers(printed: str, expected: str) -> bool:
    def pattern(line: str) -> str:
        line = re.sub(r"\s+", " ", NUMBER.sub("#", line)).strip()
        return "(.*\n)*?" if line == "..." else re.escape(line) + "\n"

    plain = "".join(
        re.sub(r"\s+", " ", NUMBER.sub("#", line)).strip() + "\n" for line in printed.splitlines()
    )
    return re.fullmatch("".join(map(pattern, expected.splitlines())), plain) is not None


def run_session(session: str, folder: Path) -> None:
    for part in re.split(r"^\$ ", session, flags=re.M)[1:]:
        command = re.match(r"(.*\\\n)*.*\n", part)[0]
        printed = shell(command, folder)
        expected = part.removeprefix(command).rstrip("\n")
        assert printed, "a program that shows nothing convinces nobody"
        assert not expected or same_but_for_numbers(printed, expected), printed


def fill(folder: Path, given: str) -> None:
    """Runs given/NAME.py in the folder."""
    if given:
        shell(f"{sys.executable} {GIVEN / given}.py", folder)


@pytest.mark.parametrize("block", marked("python", ranks=True, given=False))
def test_programs_on_ranks(block: Block, tmp_path):
    session = block.session or f"$ torchrun --nproc-per-node {block.ranks} train.py\n"
    (name,) = re.findall(r"\w+\.py", session.partition("\n")[0])
    (tmp_path / name).write_text(block.text)
    run_session(session, tmp_path)


@pytest.mark.parametrize("block", marked("python", ranks=False))
def test_programs_in_one_process(block: Block, tmp_path):
    given = (GIVEN / f"{block.given}.py").read_text() if block.given else ""
    (tmp_path / "program.py").write_text(given + block.text)
    shell(f"{sys.executable} program.py", tmp_path)


def execute(given: str, text: str, name: str, folder: str) -> None:
    os.chdir(folder)
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(given, "given", "exec"), names)
    exec(compile(text, name, "exec"), names)


@pytest.mark.parametrize("block", marked("python", ranks=True, given=True))
def test_lines_on_ranks(block: Block, tmp_path):
    given = (GIVEN / f"{block.given}.py").read_text()
    run_ranks(block.ranks, execute, given, block.text, block.name, str(tmp_path))


@pytest.mark.parametrize("block", marked("session"))
def test_sessions(block: Block, tmp_path):
    fill(tmp_path, block.given)
    run_session(block.text, tmp_path)


@pytest.mark.parametrize("block", marked("sh"))
def test_commands(block: Block, tmp_path):
    fill(tmp_path, block.given)
    shell(block.text, tmp_path)


@pytest.mark.parametrize("block", marked("cpp", same=True))
def test_cpp_programs(block: Block, tmp_path):
    text = (ROOT / block.same).read_text()
    assert text.endswith(block.text), f"{block.name} does not show {block.same} as it is"
    assert not re.sub(r"^//.*$", "", text.removesuffix(block.text), flags=re.M).strip()
    (tmp_path / "program").symlink_to(BUILD / Path(block.same).with_suffix(""))
    run_session(block.session, tmp_path)


@pytest.mark.full
def test_cpp_blocks_compile(tmp_path):
    """All in one translation unit: including torch takes longer than the rest."""
    source = ["#include <shardstep/shardstep.h>", "#include <torch/torch.h>", "#include <iostream>"]
    includes: list[str] = []
    for number, block in enumerate(b for b in BLOCKS if b.kind == "cpp" and not b.same):
        lines = block.text.splitlines()
        includes += [line for line in lines if line.startswith("#include")]
        body = ["" if line.startswith("#include") else line for line in lines]
        place = f'#line {block.line + 1} "{block.name.rpartition(":")[0]}"'
        source.append(f"namespace block_{number} {{")
        if block.given:
            given = (GIVEN / f"{block.given}.h").read_text()
            source += [given, "void run(Given& given) {", "GIVEN_NAMES", place, *body, "}"]
        else:
            source += [place, *body]
        source += ["}", "#undef GIVEN_NAMES"]
    (tmp_path / "blocks.cpp").write_text("\n".join([*dict.fromkeys(includes), *source]) + "\n")
    import torch.utils.cpp_extension as extension

    folders = [f"-isystem{path}" for path in extension.include_paths()]
    flags = ["-std=c++20", "-fsyntax-only", "-w", f"-I{ROOT}/include", *folders]
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, *flags, "blocks.cpp"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr


@pytest.mark.full
def test_the_site_builds():
    command = ["make", "--no-print-directory", "site"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
