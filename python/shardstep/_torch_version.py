"""Refuses a torch that the extension was not built for, before the linker would."""

from pathlib import Path

import torch


def check() -> None:
    """Raises ImportError unless the extension is there and was built for this torch."""
    try:
        from shardstep import _build_info
    except ImportError:
        raise ImportError(
            f"shardstep: {Path(__file__).parent} is the source, where nothing is built: "
            "run `pip install .` in the clone and import shardstep from elsewhere"
        ) from None
    installed = torch.__version__.partition("+")[0]
    if installed != _build_info.torch_version:
        raise ImportError(
            f"shardstep: built for torch {_build_info.torch_version}, got torch {installed} "
            "installed: reinstall it with "
            "`pip install --no-cache-dir --force-reinstall --no-deps` from its source"
        )
