"""Checkpoints: directories to which each rank writes what it owns."""

import os
import warnings
from datetime import timedelta
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep._C import Checkpointer
from shardstep._checkpoint_content import (
    module_tensors,
    modules_with_extra_state,
    parameter_names,
    rng_states,
    set_rng_states,
)
from shardstep._errors import telling_every_rank
from shardstep._progress import Progress, saving_progress
from shardstep._sharded_optimizer import ShardedOptimizer


def finish(checkpointer: Checkpointer) -> None:
    """Lets a save in the background end, and warns if it failed and nobody has heard of it."""
    failure = checkpointer.finish()
    if failure is not None:
        warnings.warn(failure, RuntimeWarning, stacklevel=2)


def _seconds(timeout: timedelta | float | None) -> float | None:
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 < seconds < 1e9:
        raise ValueError(f"shardstep: expected a timeout of some seconds, got {timeout}")
    return seconds


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
        timeout: timedelta | float | None = None,
    ) -> None:
        """Writes a checkpoint: each rank what it owns. Waits for the last save first. Collective.

        What was in the directory before stays until the new checkpoint is complete, also if this
        fails; then every rank raises. So it does while another save to the directory, of this
        program or another, is not complete; the error names its process.

        Args:
            module: its parameters, buffers and extra state are saved too, and its names name the
                optimizer's parameters, without those of DistributedDataParallel and torch.compile.
            extra: small values of your own; rank 0's count. Numbers, strings, bools, None, small
                tensors, and lists, tuples and dicts of these.
            rng: saves torch's random generators of each rank.
            asynchronous: return when this rank's shard is copied; a thread writes it. Nothing that
                is changed afterwards is in it. What goes wrong is raised by the next
                save_checkpoint, load_checkpoint or wait_checkpoint, and is a RuntimeWarning if the
                program ends without one.
            progress: called by the thread that writes, with bytes written and bytes in all of this
                rank's shard. True: a bar. None: a bar on rank 0 if it has a terminal, the save
                takes long and is not asynchronous.
            timeout: how many seconds rank 0 waits for another rank's file to show in the directory.
                None: 30 minutes in the background; 3 once all ranks have said that theirs are
                written, since network file systems show them late.
        """
        content: dict[str, Any] = {
            "state": {},
            "param_groups": [],
            "names": [],
            "module": [],
            "module_values": {},
            "rng": {},
            "extra": extra,
            "timeout": None,
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
            content["module_values"] = {
                name: part.get_extra_state()
                for name, part in modules_with_extra_state(module).items()
            }
            content["timeout"] = _seconds(timeout)
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
            module: its parameters, buffers and extra state are loaded too.
            rng: loads torch's random generators. At another world size, ranks that were not there
                keep theirs.
        """
        tensors: list[tuple[str, torch.Tensor, bool]] = []
        extra_states: dict[str, torch.nn.Module] = {}
        names: list[str] = []
        loaded: dict[str, Any] = {}

        def load(error: str | None) -> None:
            nonlocal loaded
            loaded = self._checkpointer.load(
                os.fspath(directory),
                param_groups=self._groups_by_index(),
                defaults=self.optim.defaults,
                names=names,
                module=tensors,
                module_values=list(extra_states),
                known_elementwise=self._is_known_elementwise,
                error=error,
            )

        with telling_every_rank(load, self._where()):
            self._let_parameters_arrive()
            tensors = module_tensors(module)
            extra_states = modules_with_extra_state(module)
            names = parameter_names(self._index_of, self.param_groups, module)
        self._take_all_or_nothing(loaded["param_groups"], loaded["state"])
        self._may_have_state = True
        self._sync_param_groups(loaded["param_groups"], self.param_groups)
        self._pull_options()
        with torch.no_grad():
            for (_, tensor, _), value in zip(tensors, loaded["module"], strict=True):
                tensor.copy_(value)
        for name, part in extra_states.items():
            if name in loaded["module_values"]:
                part.set_extra_state(loaded["module_values"][name])
            else:
                warnings.warn(
                    f"shardstep: the checkpoint in {os.fspath(directory)} has no {name}: the "
                    f"module keeps its own {self._where()}",
                    stacklevel=2,
                )
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
                self._keep_dtypes(state)
        except Exception:
            self.optim.state, self.optim.param_groups = before
            self.state = self.optim.state
            raise

    def _keep_dtypes(self, state: dict[int, dict[str, Any]]) -> None:
        """Undoes that torch.optim casts all floating state to the dtype of its parameter."""
        if type(self.optim).load_state_dict is not Optimizer.load_state_dict:
            return
        for local in self._local:
            taken = self.optim.state.get(local.tensor, {})
            for key, saved in state.get(local.index, {}).items():
                value = taken.get(key)
                if not isinstance(saved, torch.Tensor) or not isinstance(value, torch.Tensor):
                    continue
                if value.dtype != saved.dtype and value.shape == saved.shape:
                    taken[key] = saved.to(value.device)
