"""ZeRO for torch, on a C++ engine."""

from pathlib import Path

from . import _torch_version

_torch_version.check()

from . import _C  # noqa: E402  (it would not load with another torch)

__version__ = _C.version
cmake_prefix_path = str(Path(__file__).parent)
"""For CMake's find_package(shardstep), as torch.utils.cmake_prefix_path is for torch's."""

__all__ = ["__version__", "cmake_prefix_path"]
