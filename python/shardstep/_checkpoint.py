"""Checkpoints: directories to which each rank writes what it owns."""

import os
from typing import Any

import torch

from shardstep._C import Checkpointer
from shardstep._checkpoint_content import (
    module_tensors,
    parameter_names,
    rng_states,
    set_rng_states,
)
from shardstep._errors import telling_every_rank
from shardstep._progress import Progress, saving_progress
from shardstep._sharded_optimizer import ShardedOptimizer


class CheckpointMethods(ShardedOptimizer):
    """save_checkpoint, load_checkpoint and what goes with them."""

    _checkpointer: Checkpointer

    def save_checkpoint(
        self,
        directory: str | os.PathLike[str],
        *,
        module: torch.nn.Module | None = None,
        extra: dict[str, Any] | None = None,
        rng: bool = True,
        asynchronous: bool = False,
        progress: bool | Progress | None = None,
    ) -> None:
        """Writes a checkpoint: each rank what it owns. Waits for the last save first. Collective.

        What was in the directory before stays until the new checkpoint is complete, also if this
        fails; then every rank raises.

        Args:
            module: its parameters and buffers are saved too, and name the optimizer's parameters.
            extra: small values of your own; rank 0's count. Numbers, strings, bools, None, small
                tensors, and lists, tuples and dicts of these.
            rng: saves torch's random generators of each rank.
            asynchronous: return when this rank's shard is copied; a thread writes it. What goes
                wrong then is raised by the next save_checkpoint or wait_checkpoint.
            progress: called by the thread that writes, with bytes written and bytes in all of this
                rank's shard. True: a bar. None: a bar on rank 0 if it has a terminal, the save
                takes long and is not asynchronous.
        """
        content: dict[str, Any] = {
            "state": {},
            "param_groups": [],
            "names": [],
            "module": [],
            "rng": {},
            "extra": extra,
        }

        def save(error: str | None) -> None:
            self._checkpointer.save(
                os.fspath(directory),
                **content,
                background=asynchronous,
                progress=saving_progress(progress, directory, self.rank, asynchronous),
                error=error,
            )

        with telling_every_rank(save, self._where()):
            self._let_parameters_arrive()
            self._push_options()
            own, extra_state = self._local_state()
            content["state"] = {**own, **extra_state}
            content["param_groups"] = self._groups_by_index()
            content["names"] = parameter_names(self._index_of, self.param_groups, module)
            content["module"] = module_tensors(module)
            content["rng"] = rng_states() if rng else {}

    def wait_checkpoint(self) -> None:
        """Returns when the last save is complete, or raises what went wrong. Collective."""
        self._checkpointer.wait()

    def checkpoint_progress(self) -> tuple[int, int]:
        """Bytes of this rank's shard that are written, and in all."""
        return self._checkpointer.progress()

    def load_checkpoint(
        self,
        directory: str | os.PathLike[str],
        *,
        module: torch.nn.Module | None = None,
        rng: bool = True,
    ) -> dict[str, Any]:
        """Loads a checkpoint of any world size and sharding. Returns its `extra`. Collective.

        Each rank reads what it needs, and verifies it. Raises ValueError that names what does not
        fit or is damaged, on every rank, and has changed nothing then.

        Args:
            module: its parameters and buffers are loaded too.
            rng: loads torch's random generators. At another world size, ranks that were not there
                keep theirs.
        """
        tensors: list[tuple[str, torch.Tensor, bool]] = []
        names: list[str] = []
        loaded: dict[str, Any] = {}

        def load(error: str | None) -> None:
            nonlocal loaded
            loaded = self._checkpointer.load(
                os.fspath(directory),
                param_groups=self._groups_by_index(),
                names=names,
                module=tensors,
                known_elementwise=self._is_known_elementwise,
                error=error,
            )

        with telling_every_rank(load, self._where()):
            self._let_parameters_arrive()
            tensors = module_tensors(module)
            names = parameter_names(self._index_of, self.param_groups, module)
        self._take_all_or_nothing(loaded["param_groups"], loaded["state"])
        self._may_have_state = True
        self._sync_param_groups(loaded["param_groups"], self.param_groups)
        self._pull_options()
        with torch.no_grad():
            for (_, tensor, _), value in zip(tensors, loaded["module"], strict=True):
                tensor.copy_(value)
        if rng:
            set_rng_states(loaded["rng"])
        return loaded["extra"] or {}

    def checkpoint_bytes_read(self) -> int:
        """How many bytes of the shards the last load_checkpoint read on this rank."""
        return self._checkpointer.bytes_read

    def _let_parameters_arrive(self) -> None:
        self._overlap_info.wait_for_broadcasts()
        self.wait()

    def _take_all_or_nothing(
        self, groups: list[dict[str, Any]], state: dict[int, dict[str, Any]]
    ) -> None:
        """Every rank takes its share, or all of them keep what they had. Collective."""
        before = self.optim.state, self.optim.param_groups
        try:
            with telling_every_rank(self._checkpointer.share, self._where()):
                self._take(groups, state)
        except Exception:
            self.optim.state, self.optim.param_groups = before
            self.state = self.optim.state
            raise
