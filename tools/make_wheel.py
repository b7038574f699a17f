#!/usr/bin/env python3
"""Builds a wheel into dist/ and tests it where nothing else of this clone is. `make wheel` runs it.

  tools/make_wheel.py [--python PYTHON]    PYTHON has torch and what requirements/python.txt lists

The wheel is built in a folder of its own, without what only tests need. It is installed into a new
virtual environment with the same build of torch, and has to import, to train on 2 ranks, to pass
`shardstep doctor`, and to serve a CMake project.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import shardstep, torch
import torch.distributed as dist

dist.init_process_group("gloo")
models = [torch.nn.Linear(5, 3) for _ in range(2)]
models[1].load_state_dict(models[0].state_dict())
for model in models:
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
plain = torch.optim.AdamW(models[0].parameters(), lr=0.1)
ours = shardstep.ZeroRedundancyOptimizer(
    models[1].parameters(), torch.optim.AdamW, stage=2, sharding="element", lr=0.1
)
for model, optimizer in zip(models, (plain, ours)):
    model(torch.full((2, 5), 1.0 + dist.get_rank())).square().mean().backward()
    if optimizer is plain:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad.div_(2))
    optimizer.step()
for expected, found in zip(*(model.parameters() for model in models)):
    torch.testing.assert_close(found, expected)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: as AdamW", flush=True)
dist.destroy_process_group()
"""


def run(*command: object, cwd: Path, timeout: float = 600, **environment: str) -> str:
    """What the command prints; ends this program if it fails."""
    words = [str(word) for word in command]
    result = subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, **environment},
        timeout=timeout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode != 0:
        sys.exit(f"{result.stdout}\nwheel: {' '.join(words)} failed")
    return result.stdout


def pip(python: Path, *arguments: object, cwd: Path = ROOT) -> str:
    quiet = ("--quiet", "--disable-pip-version-check", "--no-cache-dir")
    return run(python, "-m", "pip", arguments[0], *quiet, *arguments[1:], cwd=cwd, timeout=1800)


def torch_version(python: Path) -> str:
    program = "import importlib.metadata as m; print(m.version('torch'))"
    return run(python, "-c", program, cwd=ROOT).strip()


def build(python: Path, folder: Path) -> Path:
    """The wheel that lies in dist/."""
    ninja = shutil.which("ninja")
    pip(
        *(python, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder),
        *("-C", "build-dir=build-wheel", "-C", f"cmake.define.CMAKE_MAKE_PROGRAM={ninja}"),
        *("-C", "cmake.define.SHARDSTEP_FAILURE_POINTS=OFF", ROOT),
    )
    (built,) = folder.glob("*.whl")
    (ROOT / "dist").mkdir(exist_ok=True)
    return Path(shutil.copy(built, ROOT / "dist"))


def check_contents(wheel: Path, torch: str) -> None:
    minor = ".".join(torch.split(".")[:2])
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        required = f"Requires-Dist: torch=={minor}.*"
        if required not in archive.read(metadata).decode().splitlines():
            sys.exit(f"wheel: expected '{required}' in {wheel.name}")
        (library,) = [name for name in names if "/libshardstep.so" in name]
        if b"shardstep_points" in archive.read(library):
            sys.exit(f"wheel: expected no failure points of the tests in {library}")


def install(wheel: Path, torch: str, folder: Path) -> Path:
    """The interpreter of a new environment that has the wheel and this torch."""
    run(sys.executable, "-m", "venv", folder, cwd=ROOT)
    python = folder / "bin" / "python"
    wanted = ("install", "--no-compile", f"torch=={torch}", wheel)
    if subprocess.run([python, "-m", "pip", *wanted], capture_output=True, timeout=1800).returncode:
        pip(python, *wanted, "--extra-index-url", "https://download.pytorch.org/whl/cpu")
    pip(python, "check")
    return python


def check_installed(python: Path, folder: Path) -> None:
    """What a user does first, in an empty folder."""
    bare = {"PYTHONPATH": "", "PYTHONWARNINGS": "ignore:Failed to initialize NumPy"}
    (folder / "train.py").write_text(PROGRAM)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    said = run(python, *torchrun, "train.py", cwd=folder, OMP_NUM_THREADS="1", **bare)
    if said.count("as AdamW") != 2:
        sys.exit(f"{said}\nwheel: expected two ranks to say that they trained")
    said = run(python.parent / "shardstep", "doctor", cwd=folder, **bare)
    print(said)
    program = "import shardstep; print(shardstep.cmake_prefix_path)"
    prefix = run(python, "-c", program, cwd=folder, **bare).splitlines()[-1]
    consumer = ("cmake", "-S", ROOT / "tests" / "consumer", "-B", "consumer", "-G", "Ninja")
    program_path = f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}"
    run(*consumer, f"-DCMAKE_PREFIX_PATH={prefix}", program_path, cwd=folder)
    run("cmake", "--build", "consumer", cwd=folder)
    print(run(folder / "consumer" / "consumer", cwd=folder).strip())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    python = parser.parse_args().python.absolute()
    torch = torch_version(python)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"wheel: building for torch {torch}", flush=True)
        wheel = build(python, folder / "built")
        check_contents(wheel, torch)
        print(f"wheel: installing {wheel.name} into a new environment", flush=True)
        installed = install(wheel, torch, folder / "venv")
        (folder / "empty").mkdir()
        check_installed(installed, folder / "empty")
    print(f"wheel: {wheel.relative_to(ROOT)} works with torch {torch}")


if __name__ == "__main__":
    main()
