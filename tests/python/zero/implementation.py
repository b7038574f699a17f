"""Which ZeroRedundancyOptimizer is tested.

SHARDSTEP_TEST_IMPLEMENTATION=torch runs the tests against torch's own class, which validates those
that apply to both. The default is ours.
"""

import importlib
import os

NAME = os.environ.get("SHARDSTEP_TEST_IMPLEMENTATION", "shardstep")
_MODULES = {
    "shardstep": ("shardstep.zero_redundancy_optimizer", "shardstep.ddp_zero_hook"),
    "torch": (
        "torch.distributed.optim.zero_redundancy_optimizer",
        "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook",
    ),
}

zero_module, hook_module = map(importlib.import_module, _MODULES[NAME])
ZeroRedundancyOptimizer = zero_module.ZeroRedundancyOptimizer
hook_with_zero_step = hook_module.hook_with_zero_step
hook_with_zero_step_interleaved = hook_module.hook_with_zero_step_interleaved
