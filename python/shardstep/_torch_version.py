"""Refuses a torch that the extension was not built for, before the linker does."""

from pathlib import Path

import torch


def check() -> None:
    """Raises ImportError unless the extension exists and was built for this minor version."""
    try:
        from shardstep import _build_info
    except ImportError:
        raise ImportError(
            f"shardstep: {Path(__file__).parent} is the source folder, which has no built "
            "extension; run `pip install .` in the clone and import shardstep from elsewhere"
        ) from None
    installed, built = _minor(torch.__version__), _minor(_build_info.torch_version)
    if installed != built:
        raise ImportError(
            f"shardstep: expected torch {built}, for which it was built, got torch {installed}; "
            "reinstall shardstep from its source with "
            "`pip install --no-cache-dir --force-reinstall --no-deps`, or install "
            f"torch=={built}.*"
        )


def _minor(version: str) -> str:
    """2.13 of 2.13.0+cpu: c10d's classes change with every minor version, and not within one."""
    return ".".join(version.split(".")[:2])
