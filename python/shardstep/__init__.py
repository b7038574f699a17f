"""ZeRO for PyTorch on a C++ engine: a drop-in for torch's ZeroRedundancyOptimizer."""

from pathlib import Path

from shardstep import _torch_version

_torch_version.check()  # first, since the extension would not load with a different torch

from shardstep import _C
from shardstep._install import install, uninstall
from shardstep._plan import Plan, plan
from shardstep._weights import Checkpoint
from shardstep.muon import muon_groups
from shardstep.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__version__ = _C.version
cmake_prefix_path = str(Path(_C.__file__).parent)
"""For CMake's find_package(shardstep), as torch.utils.cmake_prefix_path is for torch's."""

__all__ = [
    "Checkpoint",
    "Plan",
    "ZeroRedundancyOptimizer",
    "__version__",
    "cmake_prefix_path",
    "install",
    "muon_groups",
    "plan",
    "uninstall",
]
