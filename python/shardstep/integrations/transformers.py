"""Hugging Face transformers' Trainer.

    trainer = Trainer(
        ...,
        optimizer_cls_and_kwargs=(
            shardstep.ZeroRedundancyOptimizer,
            dict(optimizer_class=torch.optim.AdamW, stage=2, sharding="element", lr=1e-4),
        ),
    )
    trainer.add_callback(ShardstepCallback(trainer))

Training, clipping, accumulation, saving and resume_from_checkpoint are the Trainer's own.
"""

from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from shardstep.integrations._common import ours_among
from shardstep.integrations.accelerate import shard_with


class ShardstepCallback(TrainerCallback):  # type: ignore[misc]
    """Keeps DistributedDataParallel away from stage 2, and gathers the optimizer's state before the
    Trainer saves it. Create it before trainer.train()."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        shard_with(trainer.accelerator)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._gather_if_saved(args, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._gather_if_saved(args, control)

    def _gather_if_saved(self, args: Any, control: Any) -> None:
        # With "best", whether to save is decided after the evaluation.
        perhaps = args.save_strategy == SaveStrategy.BEST and control.should_evaluate
        if not (control.should_save or perhaps) or args.save_only_model:
            return
        for optimizer in ours_among([self._trainer.optimizer]):
            optimizer.consolidate_state_dict(to=0)
