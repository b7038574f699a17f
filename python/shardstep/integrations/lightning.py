"""Lightning's Trainer and Fabric.

    import shardstep.integrations.lightning
    trainer = Trainer(strategy="shardstep", ...)                          # or
    fabric = Fabric(strategy=shardstep.integrations.lightning.FabricStrategy(), ...)

for a ZeroRedundancyOptimizer of stage 2, which averages gradients itself and must not be under
DistributedDataParallel. Stage 1 needs nothing but Lightning's own strategy "ddp".
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from shardstep._module import broadcast
from shardstep.integrations._common import no_sync, ours_among, reduces_gradients


def _check_stage_2(optimizers: Any) -> None:
    for optimizer in optimizers:
        ours = ours_among([optimizer])
        if not ours or not reduces_gradients(ours[0]):
            raise ValueError(
                "shardstep: expected ZeroRedundancyOptimizer(stage=2) with the strategy "
                f'"shardstep", got {type(optimizer).__name__}; use the strategy "ddp" for it'
            )


def _make_same(module: torch.nn.Module) -> None:
    """Parameters and buffers become rank 0's, as DistributedDataParallel makes them."""
    group = torch.distributed.group.WORLD
    broadcast([*module.parameters(), *module.buffers()], group)


class ShardstepStrategy(DDPStrategy):  # type: ignore[misc]
    """DDPStrategy without DistributedDataParallel: the optimizer averages the gradients."""

    strategy_name = "shardstep"

    def configure_ddp(self) -> None:
        _make_same(self.model)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        _check_stage_2(self.optimizers)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """For gradient accumulation."""
        with no_sync(ours_among(self.optimizers)):
            yield


class _NoSync(_BackwardSyncControl):  # type: ignore[misc]
    def __init__(self, strategy: "FabricStrategy") -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: Any, enabled: bool) -> Any:
        optimizers = self._strategy.sharded if enabled else []
        return no_sync(optimizers)


class FabricStrategy(FabricDDPStrategy):  # type: ignore[misc]
    """The same for Fabric."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.sharded: list[Any] = []
        self._backward_sync_control = _NoSync(self)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        _make_same(module)
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        _check_stage_2([optimizer])
        self.sharded += ours_among([optimizer])
        return optimizer


StrategyRegistry.register("shardstep", ShardstepStrategy, override=True)
