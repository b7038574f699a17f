"""What a wheel requires: the minor version of torch that it is built with. scikit-build-core asks.

c10d's classes gain virtual functions with every minor version, so a binary fits only one.
"""

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

SUPPORTED = "torch>=2.12,<2.16"  # of a source distribution, built where there may be no torch
PROGRAM = "import importlib.metadata as m; print(m.version('torch'))"


def installed_torch() -> str:
    """Its version, or nothing. pip's build isolation hides packages by PYTHONPATH; -E drops it."""
    for flags in ([], ["-E"]):
        result = subprocess.run(
            [sys.executable, *flags, "-c", PROGRAM], capture_output=True, text=True, timeout=60
        )
        if result.returncode == 0:
            return result.stdout.strip()
    return ""


def dynamic_metadata(field: str, settings: Mapping[str, Any]) -> list[str]:
    assert field == "dependencies" and not settings
    version = installed_torch()
    major_minor = ".".join(version.split(".")[:2])
    return [f"torch=={major_minor}.*" if version else SUPPORTED, "tqdm>=4.66"]
