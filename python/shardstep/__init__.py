"""ZeRO for PyTorch on a C++ engine: a drop-in for torch's ZeroRedundancyOptimizer."""

from shardstep._C import version as __version__
from shardstep._install import install, uninstall
from shardstep.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer", "__version__", "install", "uninstall"]
