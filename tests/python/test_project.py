"""Checks of the project as a whole: version, commands, installed tree."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401  (libshardstep needs libtorch, which this loads)

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("SHARDSTEP_BUILD_DIR", ROOT / "build"))


def headers(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prefix")
    command = ["cmake", "--install", str(BUILD), "--prefix", str(path)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    return path


def test_library_reports_the_version_of_the_file(prefix: Path) -> None:
    # In a process of its own: a second copy of the library cannot be loaded beside the package's.
    program = f"""import ctypes
version = ctypes.CDLL({str(prefix / "lib" / "libshardstep.so")!r})["_ZN9shardstep7versionEv"]
version.restype = ctypes.c_char_p
print(version().decode())"""
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert printed.strip() == (ROOT / "VERSION").read_text().strip()


def test_installed_headers_are_those_of_include(prefix: Path) -> None:
    installed = headers(prefix / "include")
    assert installed == headers(ROOT / "include")
    assert "shardstep/process_group.h" in installed


def test_only_the_cpp_package_is_installed_without_pip(prefix: Path) -> None:
    assert {path.name for path in prefix.iterdir()} == {"include", "lib"}
    links = {path.name: path.is_symlink() for path in (prefix / "lib").glob("*.so*")}
    minor = (ROOT / "VERSION").read_text().strip().rpartition(".")[0]
    assert links == {"libshardstep.so": True, f"libshardstep.so.{minor}": False}


def test_library_shows_only_its_own_names(prefix: Path) -> None:
    command = ["nm", "-DC", "--defined-only", str(prefix / "lib" / "libshardstep.so")]
    names = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stdout
    assert "shardstep::init_process_group" in names
    assert "launch_environment" not in names


def test_changelog_knows_the_version() -> None:
    version = (ROOT / "VERSION").read_text().strip()
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_ci_runs_the_tests_and_the_checks() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [line for line in script.read_text().splitlines() if line.startswith("make ")]
    assert sorted(commands) == ["make check-format", "make check-types", "make test"]


def test_every_make_target_is_described() -> None:
    text = subprocess.run(
        ["make", "help"], cwd=ROOT, check=True, timeout=60, capture_output=True, text=True
    ).stdout
    described = {line.split()[0] for line in text.splitlines()}
    assert {"demo", "test", "format", "check-format", "install", "clean", "help"} <= described
