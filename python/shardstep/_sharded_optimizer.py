"""What the parts of ZeroRedundancyOptimizer share: the engine, the param groups and the local
optimizer, and the transfer of options and state between the last two."""

import operator
from itertools import chain
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from shardstep._C import LocalParam, ShardEngine
from shardstep._errors import where
from shardstep._forward_overlap import Arrivals
from shardstep._group_settings import GroupSettings
from shardstep._masters import MASTER_KEY
from shardstep._overlap_info import _OverlapInfo
from shardstep._param_groups import ParamGroup, options_of
from shardstep._several_optimizers import use_state
from shardstep._state_view import StateView


class ShardedOptimizer(Optimizer, Joinable):
    """An optimizer over all parameters that wraps a local one over this rank's share of them."""

    optim: Any
    engine: ShardEngine
    process_group: Any
    rank: int
    world_size: int
    _settings: list[GroupSettings]
    """Of each group."""
    _group_of: list[int]
    """The group of each parameter, by index."""
    _local_by_group: list[list[LocalParam]]
    """What this rank owns, group by group, in the order of the local optimizer's parameters."""
    _listed: list[list[torch.Tensor]]
    """The parameters of each group, as they were given."""
    _index_of: dict[torch.Tensor, int]
    """Parameters are numbered in the order in which their groups list them first."""
    _module: torch.nn.Module | None
    """Stage 2: whose names the parameters have, and whose buffers are kept the same."""
    _overlap_info: _OverlapInfo
    _consolidated: dict[Any, dict[str, Any]] | None
    """State by parameter index, or by other keys that the local optimizer uses."""
    _may_have_state: bool
    """Whether any rank may have state that its local optimizer did not start with."""
    _state_view: StateView | None
    _arrivals: Arrivals | None
    """With overlap_forward: which parameters may not have arrived yet."""

    @property
    def state(self) -> Any:
        """What this rank holds of the state, by parameter. Parameters of others have none."""
        if not hasattr(self, "optim"):  # torch's constructor
            return {}
        view = self._state_view
        if (
            view is None
            or view.data is not self.optim.state
            or len(view.local) != len(self._index_of)
        ):
            own = {local.index: local.tensor for local in self._local}
            local = {param: own.get(index) for param, index in self._index_of.items()}
            self._state_view = view = StateView(self.optim.state, local, self._where())
        return view

    @state.setter
    def state(self, state: Any) -> None:
        if not hasattr(self, "optim"):  # torch's constructor
            return
        view = self.state
        if not isinstance(state, StateView):
            state = StateView.of(state, view.local, self._where())
        use_state(self.optim, state.data)

    @staticmethod
    def _sync_param_groups(src_param_groups: list[Any], dst_param_groups: list[Any]) -> None:
        """Copies every key except the parameters."""
        for src, dst in zip(src_param_groups, dst_param_groups, strict=True):
            dst.update(options_of(src))

    def _push_options(self) -> None:
        """Copies what the user and schedulers have set to the local optimizer."""
        self._check_groups()
        self._sync_param_groups(self.param_groups, self.optim.param_groups)

    def _pull_options(self) -> None:
        """Copies what the local optimizer has set or added to the groups that the user sees."""
        self._sync_param_groups(self.optim.param_groups, self.param_groups)

    def _check_groups(self) -> None:
        """Raises ValueError if a group has other parameters than it was given."""
        groups = self.param_groups
        if len(groups) != len(self._listed):
            changed = f"{len(groups)} groups instead of {len(self._listed)}"
        else:
            for number, (group, listed) in enumerate(zip(groups, self._listed, strict=True)):
                params = group["params"]
                if len(params) != len(listed) or not all(map(operator.is_, params, listed)):
                    changed = f"others in group {number}"
                    break
            else:
                return
        raise ValueError(
            "shardstep: expected the param groups to keep the parameters that they were given, "
            f"got {changed}; use add_param_group() to add some, requires_grad_(False) or "
            f"`.grad = None` to leave some out, or create a new optimizer {self._where()}"
        )

    @property
    def _index_to_param(self) -> list[torch.Tensor]:
        return list(self._index_of)

    @property
    def _local(self) -> list[LocalParam]:
        """What this rank owns, in the order of the local optimizer's parameters."""
        return list(chain.from_iterable(self._local_by_group))

    def wait(self) -> None:
        """Returns when the parameters that step() was still sending have arrived."""
        self.engine.wait()
        if self._arrivals is not None:
            self._arrivals.forget()

    def _by_element(self, index: int) -> bool:
        """Whether a parameter may belong to several ranks."""
        return self._settings[self._group_of[index]].sharding == "element"

    def _where(self) -> str:
        return where(self.rank, self.world_size)

    def _local_state(self) -> tuple[dict[int, dict[str, Any]], dict[Any, Any]]:
        """The local state, with masters, by parameter index, and state that belongs to none."""
        local = self._local
        own: dict[int, dict[str, Any]] = {}
        extra: dict[Any, Any] = {}
        for key, values in self.optim.state_dict()["state"].items():
            if isinstance(key, int):
                own[local[key].index] = values
            else:
                extra[key] = values
        for index in {param.index for param in local}:
            master = self.engine.saved_master(index)
            if master is not None:
                own[index] = {**own.get(index, {}), MASTER_KEY: master}
        return own, extra

    def _groups_by_index(self) -> list[ParamGroup]:
        """The param groups with the indices of their parameters, each once."""
        self._check_groups()
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
            # torch searches this for the parameter of every step counter; in a list that is slow.
            local_groups.append({**group, "params": range(first, last)})
            first = last
        own.update(extra or {})
        self.optim.load_state_dict({"state": own, "param_groups": local_groups})
        self._consolidated = None

    def _finish_loading(self, groups: list[ParamGroup]) -> None:
        """Shows the options to the user, and calls the hooks for loading."""
        self._sync_param_groups(groups, self.param_groups)
        self._pull_options()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)
