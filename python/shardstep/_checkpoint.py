"""Checkpoints: directories to which each rank writes what it owns."""

import contextlib
import operator
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep._C import Checkpointer
from shardstep._checkpoint_content import (
    ModuleTensors,
    listed_schedulers,
    module_tensors,
    modules_with_extra_state,
    parameter_names,
    with_schedulers,
    without_schedulers,
)
from shardstep._engine_state import EngineValues, check_divisible, from_engine
from shardstep._errors import telling_every_rank
from shardstep._generators import rng_states, set_rng_states
from shardstep._masters import MASTER_KEY, Masters, without_masters
from shardstep._nested_state import flat, nested, nested_names
from shardstep._progress import Progress, saving_progress
from shardstep._several_optimizers import SeveralOptimizers, keep, members_of
from shardstep._sharded_optimizer import ShardedOptimizer


def finish(checkpointer: Checkpointer, process: int) -> None:
    """Waits for a background save, and warns if it failed and no call has reported that.

    `process` made the checkpointer. A fork of it does not have the thread that saves.
    """
    if os.getpid() != process:
        return
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


def _count(keep_last: int | None) -> int | None:
    if keep_last is None:
        return None
    try:
        count = operator.index(keep_last)
    except TypeError:
        raise TypeError(
            f"shardstep: expected keep_last to be an int or None, got {keep_last!r}"
        ) from None
    if abs(count) > sys.maxsize:
        raise ValueError(f"shardstep: expected keep_last of at most {sys.maxsize}, got {count}")
    return count


class CheckpointMethods(ShardedOptimizer):
    """save_checkpoint, load_checkpoint and related methods."""

    _checkpointer: Checkpointer

    def save_checkpoint(
        self,
        directory: str | os.PathLike[str],
        *,
        module: torch.nn.Module | None = None,
        extra: dict[str, Any] | None = None,
        rng: bool | str = True,
        schedulers: Sequence[Any] = (),
        keep_last: int | None = None,
        asynchronous: bool = False,
        progress: bool | Progress | None = None,
        timeout: timedelta | float | None = None,
    ) -> None:
        """Writes a checkpoint; each rank writes what it owns. Waits for the previous save first.

        An existing checkpoint in the directory stays until the new one is complete. If the save
        fails, it stays too, and every rank raises. Every rank also raises while another save to
        the directory, by this program or another, is not complete; the error names its process.
        Collective.

        Args:
            directory: where to write. In "runs/{step}" or "runs/{step:06d}", `{step}` is replaced
                by extra["step"], and the link runs/latest points at the last complete checkpoint.
            module: saves its parameters, buffers and extra state too. Its names, without prefixes
                of DistributedDataParallel and torch.compile, become those of the optimizer's
                parameters. If None, the names are those of the optimizer's own `module`.
            extra: your own small values, saved from rank 0: numbers, strings, bools, None, small
                tensors, and lists, tuples and dicts of these. NumPy's scalars become Python's.
            rng: whether to save each rank's torch random generators. "all" also saves Python's and
                NumPy's.
            schedulers: learning rate schedulers, or anything else with a state_dict() of such
                small values, saved from rank 0. Dicts in it may have any of these as keys, and may
                be Counters and OrderedDicts.
            keep_last: with a directory such as "runs/{step}", how many checkpoints to keep, the new
                one included. Older ones are removed, except while they are read. None keeps all.
            asynchronous: return as soon as this rank's shard is copied; a background thread writes
                the copy, which later changes do not affect. If it fails, the next save_checkpoint,
                load_checkpoint or wait_checkpoint raises the error; if the program ends without
                one of these, it is a RuntimeWarning.
            progress: a function that the writing thread calls with the bytes of this rank's shard
                written so far, and the total. True shows a progress bar. None shows one on rank 0
                if it has a terminal and the save takes long and is not asynchronous.
            timeout: how long rank 0 waits for another rank's file to appear in the directory, in
                seconds or as a timedelta. None means 30 minutes in the background, and otherwise 3
                minutes after all ranks have reported that their files are written, since network
                file systems may show them late.
        """
        # The binding's own errors do not reach the other ranks, so it gets what was checked before.
        path = ""
        content: dict[str, Any] = {
            "state": {},
            "param_groups": [],
            "names": [],
            "module": [],
            "module_values": {},
            "rng": {},
            "extra": None,
            "progress": None,
            "timeout": None,
            "keep_last": None,
        }

        def save(error: str | None) -> None:
            self._checkpointer.save(path, **content, background=bool(asynchronous), error=error)

        with telling_every_rank(save, self._where()):
            path = os.fspath(directory)
            self._let_parameters_arrive()
            self._push_options()
            own, extra_state = self._local_state()
            for index, values in own.items():
                if self._by_element(index):
                    check_divisible(index, values)
            own = {index: flat(values) for index, values in own.items()}
            content["state"] = {**own, **extra_state}
            content["param_groups"] = self._groups_by_index()
            content["names"] = self._names(module)
            content["module"] = module_tensors(module)
            content["module_values"] = {
                name: part.get_extra_state()
                for name, part in modules_with_extra_state(module).items()
            }
            content["timeout"] = _seconds(timeout)
            content["keep_last"] = _count(keep_last)
            content["extra"] = with_schedulers(extra, listed_schedulers(schedulers, "state_dict"))
            content["rng"] = rng_states(rng)
            content["progress"] = saving_progress(progress, path, self.rank, asynchronous)

    def wait_checkpoint(self) -> None:
        """Returns when the last save is complete, or raises its error. Collective."""
        self._checkpointer.wait()

    def checkpoint_progress(self) -> tuple[int, int]:
        """Returns how many bytes of this rank's shard are written, and the total."""
        return self._checkpointer.progress()

    def load_checkpoint(
        self,
        directory: str | os.PathLike[str],
        *,
        module: torch.nn.Module | None = None,
        rng: bool = True,
        schedulers: Sequence[Any] = (),
    ) -> dict[str, Any]:
        """Loads a checkpoint of any world size and sharding. Returns its `extra`. Collective.

        Each rank reads what it needs, and verifies it. If something does not fit or is damaged,
        every rank raises a ValueError that names it, and nothing changes. If a scheduler or the
        extra state of a module raises on one rank, every rank raises; the optimizer's state and the
        module's tensors are loaded by then.

        Args:
            module: loads its parameters, buffers and extra state too.
            rng: whether to load the random generators that were saved. Ranks that did not exist
                when the checkpoint was saved keep theirs.
            schedulers: the schedulers to load, in the order in which they were saved.
        """
        path = ""
        tensors: ModuleTensors = []
        extra_states: dict[str, torch.nn.Module] = {}
        names: list[str] = []
        loaded: dict[str, Any] = {}

        def load(error: str | None) -> None:
            nonlocal loaded
            loaded = self._checkpointer.load(
                path,
                param_groups=self._groups_by_index(),
                defaults=self._defaults_by_group(),
                names=names,
                module=tensors,
                module_values=list(extra_states),
                known_elementwise=[settings.is_known_elementwise for settings in self._settings],
                error=error,
            )

        with telling_every_rank(load, self._where()):
            path = os.fspath(directory)
            schedulers = listed_schedulers(schedulers, "load_state_dict")
            self._let_parameters_arrive()
            tensors = module_tensors(module)
            extra_states = modules_with_extra_state(module)
            names = self._names(module)
        with self._all_or_nothing():
            extra, scheduler_states = without_schedulers(loaded["extra"], schedulers, path)
            state, masters = without_masters(loaded["state"])
            self._take_share(loaded["param_groups"], state)
        with telling_every_rank(self._checkpointer.share, self._where()):
            self._show_loaded(loaded, masters, tensors)
            self._set_extra_states(extra_states, loaded["module_values"], path)
            if rng:
                set_rng_states(loaded["rng"])
            for scheduler, scheduler_state in zip(schedulers, scheduler_states, strict=True):
                scheduler.load_state_dict(scheduler_state)
        return extra

    def checkpoint_bytes_read(self) -> int:
        """Returns how many bytes of the shards the last load_checkpoint read on this rank."""
        return self._checkpointer.bytes_read

    def _names(self, module: torch.nn.Module | None) -> list[str]:
        named_by = module if module is not None else self._module
        return parameter_names(self._index_of, self.param_groups, named_by)

    def _defaults_by_group(self) -> list[dict[str, Any]]:
        if isinstance(self.optim, SeveralOptimizers):
            return [self.optim.member_of(g).defaults for g in range(len(self.param_groups))]
        return [self.optim.defaults] * len(self.param_groups)

    def _let_parameters_arrive(self) -> None:
        self._overlap_info.wait_for_broadcasts()
        self.wait()

    def _with_module_as_masters(
        self, masters: Masters, module: ModuleTensors, saved: list[torch.Tensor]
    ) -> Masters:
        """Where a state has no masters, they start from the module's parameters as they were saved,
        which may have been wider."""
        # Tensors of a module are listed detached.
        by_memory = {t.data_ptr(): v for (_, t, _), v in zip(module, saved, strict=True)}
        whole: dict[int, EngineValues] = {}
        for param, index in self._index_of.items():
            value = by_memory.get(param.data_ptr()) if param.numel() > 0 else None
            if value is not None and masters.get(index) is None and self.engine.has_master(index):
                whole[index] = [(MASTER_KEY, value)]
        cut = self.engine.cut_state(whole)
        return {**masters, **{i: from_engine(values)[MASTER_KEY] for i, values in cut.items()}}

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """If its block raises on one rank, every rank raises, and the local optimizers have what
        they had before. Collective."""
        restore = keep(self.optim)
        try:
            with telling_every_rank(self._checkpointer.share, self._where()):
                yield
        except Exception:
            restore()
            raise

    def _take_share(self, groups: list[dict[str, Any]], state: dict[int, dict[str, Any]]) -> None:
        """Hands the local optimizer its share of a checkpoint."""
        for index, values in state.items():
            if self._by_element(index) and (names := nested_names(values)):
                raise ValueError(
                    f"shardstep: expected state of plain tensors for parameter {index} "
                    f"when sharding by element, got {', '.join(names)}; shard by parameter"
                )
        state = {index: nested(values) for index, values in state.items()}
        self._take(groups, state)
        self._keep_dtypes(state)

    def _show_loaded(
        self, loaded: dict[str, Any], masters: Masters, tensors: ModuleTensors
    ) -> None:
        """After the local optimizer: masters, the groups that the user sees, and the module."""
        self.engine.load_masters(self._with_module_as_masters(masters, tensors, loaded["module"]))
        self._may_have_state = True
        self._sync_param_groups(loaded["param_groups"], self.param_groups)
        self._pull_options()
        with torch.no_grad():
            for (_, tensor, _), value in zip(tensors, loaded["module"], strict=True):
                tensor.copy_(value)
        if loaded["has_masters"]:
            self.engine.widen_own_params(masters)

    def _set_extra_states(
        self, parts: dict[str, torch.nn.Module], values: dict[str, Any], path: str
    ) -> None:
        for name, part in parts.items():
            if name in values:
                part.set_extra_state(values[name])
            else:
                warnings.warn(
                    f"shardstep: the checkpoint in {path} has no {name}: the "
                    f"module keeps its own {self._where()}",
                    stacklevel=3,
                )

    def _keep_dtypes(self, state: dict[int, dict[str, Any]]) -> None:
        """Reverts torch.optim's cast of all floating-point state to its parameter's dtype."""
        for member in members_of(self.optim):
            if type(member).load_state_dict is not Optimizer.load_state_dict:
                return
        for local in self._local:
            taken = self.optim.state.get(local.tensor, {})
            for key, saved in state.get(local.index, {}).items():
                if key in taken:
                    taken[key] = _as_saved(taken[key], saved)


def _as_saved(value: Any, saved: Any) -> Any:
    """What a local optimizer has loaded, with the dtypes that were saved."""
    if isinstance(value, torch.Tensor) and isinstance(saved, torch.Tensor):
        is_cast = value.dtype != saved.dtype and value.shape == saved.shape
        return saved.to(value.device) if is_cast else value
    if type(value) is type(saved) is dict and value.keys() == saved.keys():
        return {key: _as_saved(value[key], saved[key]) for key in value}
    if type(value) is type(saved) and type(value) in (list, tuple) and len(value) == len(saved):
        return type(value)(_as_saved(*pair) for pair in zip(value, saved, strict=True))
    return value
