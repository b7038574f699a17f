"""The state as a plain optimizer's dict: gathered on one rank, loaded by each rank by itself."""

from itertools import chain
from typing import Any

import torch

from shardstep._C import Checkpointer
from shardstep._engine_state import check_divisible, from_engine, to_engine
from shardstep._errors import telling_every_rank
from shardstep._masters import MASTER_KEY, without_masters
from shardstep._param_groups import ParamGroup, options_of
from shardstep._sharded_optimizer import ShardedOptimizer


class StateDictMethods(ShardedOptimizer):
    """consolidate_state_dict, state_dict and load_state_dict."""

    _checkpointer: Checkpointer

    def consolidate_state_dict(self, to: int = 0) -> dict[str, Any] | None:
        """Gathers the state of all ranks on rank `to`, where state_dict() then returns it.

        Tensors go to `to` alone, one bucket at a time. Returns the dict there, None on the other
        ranks. Collective.
        """
        with telling_every_rank(self._checkpointer.share, self._where()):
            self._push_options()
            own, extra = self._local_state()
            for index, values in own.items():
                if self._by_element(index):
                    check_divisible(index, values)
            local = {index: to_engine(values) for index, values in own.items()}
        whole = self.engine.gather_state(local, to)
        self._consolidated = None
        if self.rank != to:
            return None
        self._consolidated = {index: from_engine(values) for index, values in whole.items()}
        self._consolidated.update(extra)  # state without a parameter is the same on every rank
        return self._as_plain(self._consolidated)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state last consolidated on this rank, as the plain optimizer would.

        Before any rank has state, it returns the plain optimizer's dict without consolidating.
        Raises RuntimeError on ranks on which the state was not consolidated.
        """
        state = self._consolidated
        if state is None:
            if self._may_have_state or self._has_state_from_the_start():
                raise RuntimeError(
                    "shardstep: expected a consolidated state, got none on this rank; call "
                    f"consolidate_state_dict(to={self.rank}) on all ranks before state_dict() "
                    f"{self._where()}"
                )
            state = {}
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = self._as_plain(state)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a plain optimizer's dict, or one consolidated at any world size.

        This rank keeps its share; the caller's dict is not modified. If something does not fit,
        raises a ValueError that names it and changes nothing.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        ours = [[self._index_of[p] for p in group["params"]] for group in self.param_groups]
        theirs = [list(group["params"]) for group in state_dict["param_groups"]]
        for key in chain.from_iterable(theirs):
            if not isinstance(key, int):
                raise ValueError(
                    "shardstep: expected parameters by number in the groups of a state dict, got "
                    f"{key!r} {self._where()}"
                )
        indices = self.engine.match_params(theirs, ours)
        whole, extra = {}, {}
        for key, values in state_dict["state"].items():
            if not isinstance(key, int):
                extra[key] = values
            elif key not in indices:
                raise ValueError(
                    "shardstep: expected state of parameters that a group lists, got state of "
                    f"parameter {key} {self._where()}"
                )
            else:
                whole[indices[key]] = values
        self._check_shapes(whole)
        cut = self.engine.cut_state({index: to_engine(values) for index, values in whole.items()})
        own, masters = without_masters({i: from_engine(values) for i, values in cut.items()})
        groups = [options_of(group) for group in state_dict["param_groups"]]
        self._take(groups, own, extra)
        self.engine.load_masters(masters)
        self.engine.widen_params(
            {index: values[MASTER_KEY] for index, values in whole.items() if MASTER_KEY in values}
        )
        self._may_have_state = bool(state_dict["state"])
        self._finish_loading(groups)

    def _as_plain(self, state: dict[Any, dict[str, Any]]) -> dict[str, Any]:
        """A plain optimizer's dict over the same groups.

        A parameter's key is the position where its group lists it last.
        """
        places: dict[torch.Tensor, int] = {}
        groups: list[ParamGroup] = []
        first = 0
        for group in self.param_groups:
            for place, param in enumerate(group["params"], first):
                places[param] = place
            listed = [places[param] for param in group["params"]]
            groups.append({**options_of(group), "params": listed})
            first += len(listed)
        by_index = list(places.values())
        return {
            "state": {by_index[k] if isinstance(k, int) else k: v for k, v in state.items()},
            "param_groups": groups,
        }

    def _has_state_from_the_start(self) -> bool:
        """Whether local optimizers have state from construction, as Adagrad does."""
        if self.optim.state or self._local:
            return bool(self.optim.state)
        param = torch.zeros(1, requires_grad=True)  # a rank that owns nothing tries a new one
        for group, settings in zip(self.param_groups, self._settings, strict=True):
            if not settings.is_known_elementwise:
                continue  # it may refuse such a parameter
            options = options_of(group)
            options.pop("param_names", None)
            if settings.make([{**options, "params": [param]}]).state:
                return True
        return False

    def _check_shapes(self, state: dict[int, dict[str, Any]]) -> None:
        for index, values in state.items():
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    shape = list(value.shape)
                    known = self._settings[self._group_of[index]].is_known_elementwise
                    self.engine.check_state_shape(name, shape, index, known)
