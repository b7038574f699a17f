"""What the parts of ZeroRedundancyOptimizer share: the engine, the param groups and the local
optimizer, and how options and state pass between the last two."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from shardstep._C import LocalParam, ShardEngine
from shardstep._errors import where
from shardstep._forward_overlap import Arrivals
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
    _is_known_elementwise: bool
    """Whether state tensors have the shapes of their parameters, or no axes."""
    _local_by_group: list[list[LocalParam]]
    """What this rank owns, group by group, in the order of the local optimizer's parameters."""
    _index_of: dict[torch.Tensor, int]
    """Parameters are numbered in the order in which their groups list them first."""
    _overlap_info: _OverlapInfo
    _consolidated: dict[Any, dict[str, Any]] | None
    """State by parameter index, or under other keys of the local optimizer's."""
    _may_have_state: bool
    """Whether any rank may have state that its local optimizer did not start with."""
    _arrivals: Arrivals | None
    """With overlap_forward: which parameters may still be on their way."""

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

    @property
    def _local(self) -> list[LocalParam]:
        """What this rank owns, in the order of the local optimizer's parameters."""
        return list(chain.from_iterable(self._local_by_group))

    def wait(self) -> None:
        """Returns when the parameters have arrived that step() left travelling."""
        self.engine.wait()
        if self._arrivals is not None:
            self._arrivals.forget()

    def _where(self) -> str:
        return where(self.rank, self.world_size)

    def _local_state(self) -> tuple[dict[int, dict[str, Any]], dict[Any, Any]]:
        """The local optimizer's state by parameter index, and what is of no parameter."""
        local = self._local
        own: dict[int, dict[str, Any]] = {}
        extra: dict[Any, Any] = {}
        for key, values in self.optim.state_dict()["state"].items():
            if isinstance(key, int):
                own[local[key].index] = values
            else:
                extra[key] = values
        return own, extra

    def _groups_by_index(self) -> list[ParamGroup]:
        """The param groups with the indices of their parameters, each once."""
        return [
            {
                **options_of(group),
                "params": [self._index_of[param] for param in dict.fromkeys(group["params"])],
            }
            for group in self.param_groups
        ]

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
            # torch looks for every step counter's parameter in here: a list would take it long.
            local_groups.append({**group, "params": range(first, last)})
            first = last
        own.update(extra or {})
        self.optim.load_state_dict({"state": own, "param_groups": local_groups})
        self.state = self.optim.state
        self._consolidated = None

    def _finish_loading(self, groups: list[ParamGroup]) -> None:
        """Brings the options to where the user sees them, and tells who wants to know."""
        self._sync_param_groups(groups, self.param_groups)
        self._pull_options()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)
