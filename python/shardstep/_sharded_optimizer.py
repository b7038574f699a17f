"""What the parts of ZeroRedundancyOptimizer share: the engine, the param groups and the local
optimizer, and how options and state pass between the last two."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from shardstep._C import LocalParam, ShardEngine
from shardstep._errors import where
from shardstep._overlap_info import _OverlapInfo
from shardstep._param_groups import ParamGroup, options_of


class ShardedOptimizer(Optimizer, Joinable):
    """An optimizer over all parameters around a local one, which has this rank's share of them."""

    optim: Any
    engine: ShardEngine
    process_group: Any
    rank: int
    world_size: int
    _optimizer_class: Callable[..., Optimizer]
    _arguments: dict[str, Any]
    """What the optimizer's class is called with besides the parameters."""
    _sharding: str
    _elementwise: bool
    """Whether the local optimizer is known, or was said, to update each element on its own."""
    _local: list[LocalParam]
    """What this rank owns, in the order of the local optimizer's parameters."""
    _index_of: dict[torch.Tensor, int]
    """Parameters are numbered in the order in which their groups list them."""
    _overlap_info: _OverlapInfo

    @staticmethod
    def _sync_param_groups(src_param_groups: list[Any], dst_param_groups: list[Any]) -> None:
        """Copies every key but the parameters."""
        for src, dst in zip(src_param_groups, dst_param_groups, strict=True):
            dst.update(options_of(src))

    def _push_options(self) -> None:
        """What the user and schedulers have set reaches the local optimizer."""
        self._sync_param_groups(self.param_groups, self.optim.param_groups)

    def _pull_options(self) -> None:
        """What the local optimizer has set, or has added, is shown to the user."""
        self._sync_param_groups(self.optim.param_groups, self.param_groups)

    @property
    def _index_to_param(self) -> list[torch.Tensor]:
        return list(self._index_of)

    def _local_by_group(self) -> Iterator[tuple[int, LocalParam]]:
        """What this rank owns, in the local optimizer's order, with the group's number."""
        for group in range(len(self.param_groups)):
            for local in self.engine.local_params(group):
                yield group, local

    def wait(self) -> None:
        """Returns when the parameters have arrived that step() left travelling."""
        self.engine.wait()

    def _where(self) -> str:
        return where(self.rank, self.world_size)

    def _packed_groups(self) -> list[ParamGroup]:
        """The param groups as a plain optimizer's state_dict() has them."""
        groups: list[ParamGroup] = []
        first = 0
        for group in self.param_groups:
            last = first + len(group["params"])
            groups.append({**options_of(group), "params": list(range(first, last))})
            first = last
        return groups

    def _take(
        self,
        groups: list[ParamGroup],
        state: dict[int, dict[str, Any]],
        extra: dict[Any, Any] | None = None,
    ) -> None:
        """Hands the local optimizer its share of a state, by parameter index."""
        own: dict[Any, Any] = {
            position: state[local.index]
            for position, local in enumerate(self._local)
            if local.index in state
        }
        first = 0
        local_groups = []
        for group, local_group in zip(groups, self.optim.param_groups, strict=True):
            last = first + len(local_group["params"])
            local_groups.append({**group, "params": list(range(first, last))})
            first = last
        own.update(extra or {})
        self.optim.load_state_dict({"state": own, "param_groups": local_groups})
        self.state = self.optim.state
        self._forget_consolidated()

    def _forget_consolidated(self) -> None:
        self._consolidated: dict[Any, dict[str, Any]] | None = None

    def _fitting_groups(
        self, state_dict: dict[str, Any]
    ) -> tuple[list[ParamGroup], dict[int, int]]:
        """The options of a dict's groups, and our index of each parameter that they list."""
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"shardstep: expected {len(self.param_groups)} param groups, got {len(groups)} "
                f"{self._where()}"
            )
        positions: dict[int, int] = {}
        for g, (theirs, ours) in enumerate(zip(groups, self.param_groups, strict=True)):
            if len(theirs["params"]) != len(ours["params"]):
                raise ValueError(
                    f"shardstep: expected {len(ours['params'])} parameters in group {g}, "
                    f"got {len(theirs['params'])} {self._where()}"
                )
            for key in theirs["params"]:
                positions[key] = len(positions)
        return [options_of(group) for group in groups], positions

    def _finish_loading(self, groups: list[ParamGroup]) -> None:
        """Brings the options to where the user sees them, and tells who wants to know."""
        self._sync_param_groups(groups, self.param_groups)
        self._pull_options()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)
