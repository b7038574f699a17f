"""The Python package as installed: what is in it, and how it is found. Runs outside the source."""

import collections
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
VERSION = (ROOT / "VERSION").read_text().strip()


def run(
    *command: object, cwd: Path, timeout: float = 180, **environment: str
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        timeout=timeout,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def distribution() -> importlib.metadata.Distribution:
    return importlib.metadata.distribution("shardstep")


@pytest.fixture(scope="module")
def package(distribution: importlib.metadata.Distribution) -> Path:
    return Path(str(distribution.locate_file("shardstep"))).resolve()


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a program elsewhere sees."""
    program = """if True:
        import json
        import shardstep
        print(json.dumps({
            "file": shardstep.__file__,
            "version": shardstep.__version__,
            "C++ version": shardstep._C.version,
            "torch": shardstep._C.torch_version,
            "prefix": shardstep.cmake_prefix_path,
        }))
    """
    result = run(sys.executable, "-c", program, cwd=tmp_path_factory.mktemp("elsewhere"))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def installed_files(distribution: importlib.metadata.Distribution) -> dict[str, Path]:
    """The package's files by their name in it, without what Python compiled."""
    return {
        str(file.relative_to("shardstep")): Path(str(file.locate()))
        for file in distribution.files or []
        if file.parts[0] == "shardstep" and "__pycache__" not in file.parts
    }


def test_is_imported_from_where_it_was_installed(package: Path, imported: dict[str, str]) -> None:
    assert Path(imported["file"]).resolve() == package / "__init__.py"
    assert ROOT / "python" not in package.parents


def test_one_version(
    distribution: importlib.metadata.Distribution, imported: dict[str, str]
) -> None:
    assert distribution.version == imported["version"] == imported["C++ version"] == VERSION
    assert torch.__version__.partition("+")[0] == imported["torch"]


def test_metadata(distribution: importlib.metadata.Distribution) -> None:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace("-", "_")
    wheel = distribution.read_text("WHEEL") or ""
    assert f"Tag: {tag}-{tag}-{platform}" in wheel.splitlines()
    minor = ".".join(torch.__version__.split(".")[:2])
    assert distribution.requires == [f"torch=={minor}.*", "tqdm>=4.66"]


def test_files(distribution: importlib.metadata.Distribution) -> None:
    source = ROOT / "python" / "shardstep"
    python = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.suffix in (".py", ".pyi", ".typed")
    }
    assert {"py.typed", "_C.pyi", "__init__.py"} <= python
    headers = {
        str(path.relative_to(ROOT)) for path in (ROOT / "include").rglob("*") if path.is_file()
    }
    library = f"lib/libshardstep.so.{VERSION.rpartition('.')[0]}"
    module = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    names = ("Config", "ConfigVersion", "Targets", "Targets-release")
    cmake = {f"lib/cmake/shardstep/shardstep{name}.cmake" for name in names}
    cmake.add("lib/cmake/shardstep/ShardstepTorch.cmake")
    files = installed_files(distribution)
    assert set(files) == {*python, *headers, *cmake, library, module, "_build_info.py"}
    for name in python:
        assert files[name].read_bytes() == (source / name).read_bytes(), "run make install"


def test_no_file_is_there_twice(distribution: importlib.metadata.Distribution) -> None:
    files = installed_files(distribution).values()
    assert not [path for path in files if path.is_symlink()]
    contents = collections.Counter(path.read_bytes() for path in files if path.stat().st_size)
    assert max(contents.values()) == 1


def test_libraries_are_found_relative_to_each_other(
    distribution: importlib.metadata.Distribution,
) -> None:
    paths = {}
    for name, path in installed_files(distribution).items():
        if ".so" in name:
            dynamic = run("readelf", "-dW", path, cwd=path.parent).stdout
            (paths[name.partition(".")[0]],) = re.findall(r"R(?:UN)?PATH\) +.*\[(.*)\]", dynamic)
    assert paths == {
        "_C": "$ORIGIN/lib:$ORIGIN/../torch/lib",
        "lib/libshardstep": "$ORIGIN/../../torch/lib",
    }


@pytest.mark.full  # Package.Consumer builds it with the installed tree
def test_a_cpp_program_is_built_with_it(
    package: Path, imported: dict[str, str], tmp_path: Path
) -> None:
    prefix = imported["prefix"]
    assert Path(prefix).resolve() == package
    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    configured = run(
        *("cmake", "-S", ROOT / "tests" / "consumer", "-B", "build", "-G", "Ninja"),
        *(f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCMAKE_MAKE_PROGRAM={ninja}"),
        cwd=tmp_path,
        timeout=120,
    )
    assert configured.returncode == 0, configured.stdout + configured.stderr
    cache = (tmp_path / "build" / "CMakeCache.txt").read_text()
    (torch_dir,) = re.findall(r"^SHARDSTEP_TORCH_CONFIG_DIR:PATH=(.*)$", cache, re.M)
    assert Path(torch_dir).resolve().is_relative_to(Path(torch.__file__).resolve().parent)
    built = run("cmake", "--build", "build", cwd=tmp_path, timeout=600)
    assert built.returncode == 0, built.stdout + built.stderr
    program = run(tmp_path / "build" / "consumer", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert program.returncode == 0, program.stderr
    assert program.stdout.startswith(f"shardstep {VERSION}, 1 rank(s), loss ")


def test_another_torch_is_refused_before_the_extension_is_loaded(
    package: Path, tmp_path: Path
) -> None:
    shutil.copytree(
        package, tmp_path / "shardstep", ignore=shutil.ignore_patterns("lib", "_C.*.so")
    )
    (tmp_path / "shardstep" / "_C.py").write_text("raise SystemError('loaded')")
    (tmp_path / "shardstep" / "_build_info.py").write_text('torch_version = "1.2.3"\n')
    result = run(sys.executable, "-c", "import shardstep", cwd=tmp_path)
    installed = ".".join(torch.__version__.split(".")[:2])
    expected = f"shardstep: expected torch 1.2, for which it was built, got torch {installed}; "
    assert f"ImportError: {expected}" in result.stderr
    assert "pip install --no-cache-dir --force-reinstall --no-deps" in result.stderr


def test_the_source_says_that_nothing_is_built_there(tmp_path: Path) -> None:
    result = run(sys.executable, "-Bc", "import shardstep", cwd=ROOT / "python")
    assert re.search(
        "ImportError: shardstep: .*has no built extension; run `pip install .`", result.stderr
    )


def configure(tmp_path: Path, python: Path | str, **environment: str):
    """Configures as pip does: no tests, no CMAKE_PREFIX_PATH."""
    return run(
        *("cmake", "-S", ROOT, "-B", "build", "-DSKBUILD=2", f"-DPython_EXECUTABLE={python}"),
        cwd=tmp_path,
        timeout=120,
        CMAKE_PREFIX_PATH="",
        **environment,
    )


def test_builds_with_the_installed_torch_though_pip_hides_it(tmp_path: Path) -> None:
    hide = "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]"
    (tmp_path / "sitecustomize.py").write_text(hide)
    json = importlib.util.find_spec("nlohmann_json")  # pip installs it for the build
    if json and json.submodule_search_locations:
        (tmp_path / "nlohmann_json").symlink_to(json.submodule_search_locations[0])
    hidden = run(sys.executable, "-c", "import torch", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert "No module named 'torch'" in hidden.stderr
    result = configure(tmp_path, sys.executable, PYTHONPATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    cache = (tmp_path / "build" / "CMakeCache.txt").read_text()
    found = Path(torch.__file__).parent / "share" / "cmake" / "Torch"
    assert f"SHARDSTEP_TORCH_CONFIG_DIR:PATH={found}" in cache
    assert "SHARDSTEP_BUILD_PYTHON:BOOL=ON" in cache
    assert "SHARDSTEP_BUILD_TESTS:BOOL=OFF" in cache


def test_without_torch_the_build_says_what_to_do(tmp_path: Path) -> None:
    venv = run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=tmp_path)
    assert venv.returncode == 0, venv.stderr
    result = configure(tmp_path, tmp_path / "venv" / "bin" / "python")
    assert result.returncode != 0
    said = " ".join(result.stderr.split())
    assert "got none: install it (pip install torch) and run this again" in said


@pytest.mark.full
def test_types_reach_a_users_program(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import shardstep\n"
        "import torch\n"
        "parameters = torch.nn.Linear(2, 2).parameters()\n"
        "optimizer: torch.optim.Optimizer = shardstep.ZeroRedundancyOptimizer(\n"
        "    parameters, optimizer_class=torch.optim.Adam, lr=0.1\n"
        ")\n"
        "prefix: str = shardstep.cmake_prefix_path\n"
        "wrong: int = shardstep.__version__  # type: ignore[assignment]\n"
        "shardstep.no_such_name  # type: ignore[attr-defined]\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", ROOT / ".mypy_cache"]
    result = run(*command, program, cwd=tmp_path, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
