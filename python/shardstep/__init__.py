"""ZeRO for torch, on a C++ engine."""

from pathlib import Path

from . import _torch_version

_torch_version.check()  # first, since the extension would not load with another torch

from . import _C

__version__ = _C.version
cmake_prefix_path = str(Path(_C.__file__).parent)
"""For CMake's find_package(shardstep), as torch.utils.cmake_prefix_path is for torch's."""

__all__ = ["__version__", "cmake_prefix_path"]
