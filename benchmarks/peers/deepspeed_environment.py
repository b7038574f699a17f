"""DeepSpeed's own virtual environment, since the project does not need its requirements."""

import os
import subprocess
import sys
from pathlib import Path

from launch import Environment, progress

ROOT = Path(__file__).resolve().parent.parent.parent
REQUIREMENTS = Path(__file__).resolve().parent / "requirements-deepspeed.txt"
FOLDER = ROOT / "build" / "peers-deepspeed"
LIMIT = 1200
# It compiles its shared memory operator on first use, with the ninja that the path shows.
VARIABLES = {
    "DS_ACCELERATOR": "cpu",
    "TORCH_EXTENSIONS_DIR": str(FOLDER / "extensions"),
    "PATH": f"{FOLDER / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
}
CHECK = """
import deepspeed, torch
assert torch.version.cuda is None, torch.__version__
deepspeed.accelerator.get_accelerator().create_op_builder("ShareMemCommBuilder").load()
"""


class NotInstalled(Exception):
    """Why DeepSpeed cannot run."""


def prepare() -> Environment:
    """Made when it is missing or was made from other requirements."""
    python, stamp = FOLDER / "bin" / "python", FOLDER / "requirements.txt"
    wanted = REQUIREMENTS.read_text()
    if not (stamp.exists() and stamp.read_text() == wanted):
        progress(f"peers: installing DeepSpeed into {FOLDER} (its log: {FOLDER}.log)")
        install(python)
        run([str(python), "-c", CHECK])  # ranks that are stopped while compiling leave a lock
        stamp.write_text(wanted)
    return Environment(python, VARIABLES)


def install(python: Path) -> None:
    pins = REQUIREMENTS.read_text().splitlines()
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    run([sys.executable, "-m", "venv", "--clear", str(FOLDER)])
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    # As tools/setup.sh: the CPU build, first and by itself, so that nothing later asks for another.
    try:
        run([*pip, f"{torch}+cpu"])
    except NotInstalled:
        run([*pip, "--extra-index-url", "https://download.pytorch.org/whl/cpu", torch])
    # DeepSpeed builds from source and looks at the torch that it finds. An isolated build
    # would fetch another.
    run([*pip, "setuptools", "wheel", "ninja", "py-cpuinfo"])
    run([*pip, "--no-build-isolation", "-r", str(REQUIREMENTS)])


def run(command: list[str]) -> None:
    log = FOLDER.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as output:
        try:
            code = subprocess.run(
                command,
                env={**os.environ, **VARIABLES},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=LIMIT,
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotInstalled(str(error)) from error
    if code != 0:
        raise NotInstalled(f"{' '.join(command)} ended with {code}; see {log}")
