"""The state as a plain optimizer's dict: gathered on one rank, and loaded by each for itself."""

from typing import Any

import torch

from shardstep._engine_state import from_engine, to_engine
from shardstep._sharded_optimizer import ShardedOptimizer


class StateDictMethods(ShardedOptimizer):
    """consolidate_state_dict, state_dict and load_state_dict."""

    def consolidate_state_dict(self, to: int = 0) -> dict[str, Any] | None:
        """Gathers the state of all ranks on rank `to`, where state_dict() then gives it.

        Tensors go to `to` alone, a bucket at a time. Returns the dict there, None elsewhere.
        Collective.
        """
        self._push_options()
        states = self.optim.state_dict()["state"]
        local = {
            self._local[key].index: to_engine(values)
            for key, values in states.items()
            if isinstance(key, int)
        }
        whole = self.engine.gather_state(local, to)
        self._forget_consolidated()
        if self.rank != to:
            return None
        self._consolidated = {index: from_engine(values) for index, values in whole.items()}
        # State of no parameter is the same on every rank.
        self._consolidated.update((k, v) for k, v in states.items() if not isinstance(k, int))
        return {"state": dict(self._consolidated), "param_groups": self._packed_groups()}

    def state_dict(self) -> dict[str, Any]:
        """What was last consolidated on this rank, as the plain optimizer would give it."""
        if self._consolidated is None:
            raise RuntimeError(
                "shardstep: expected a consolidated state, got none on this rank: call "
                f"consolidate_state_dict(to={self.rank}) on all ranks before state_dict() "
                f"{self._where()}"
            )
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict: dict[str, Any] = {
            "state": dict(self._consolidated),
            "param_groups": self._packed_groups(),
        }
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a plain optimizer's dict, or one consolidated at any world size.

        This rank keeps its share; the caller's dict stays as it is. Raises ValueError that names
        what does not fit, and has changed nothing then.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        groups, positions = self._fitting_groups(state_dict)
        whole, extra = {}, {}
        for key, values in state_dict["state"].items():
            if not isinstance(key, int):
                extra[key] = values
            elif key not in positions:
                raise ValueError(
                    "shardstep: expected state of parameters that a group lists, got state of "
                    f"parameter {key} {self._where()}"
                )
            else:
                self._check_shapes(positions[key], values)
                whole[positions[key]] = to_engine(values)
        cut = self.engine.cut_state(whole)
        own = {index: from_engine(values) for index, values in cut.items()}
        self._take(groups, own, extra)
        self._finish_loading(groups)

    def _check_shapes(self, index: int, values: dict[str, Any]) -> None:
        param = self._index_to_param[index]
        known = self._known_shapes(index)
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                continue
            expected = known.get(name)
            if expected is None and self._elementwise and value.dim() > 0:
                expected = param.shape
            if expected is not None and value.shape != expected:
                raise ValueError(
                    f"shardstep: expected {name} of parameter {index} with shape "
                    f"{tuple(expected)}, got {tuple(value.shape)} {self._where()}"
                )

    def _known_shapes(self, index: int) -> dict[str, torch.Size]:
        """Shapes of the state that this rank holds of a whole parameter."""
        for local in self._local:
            if local.index == index and local.tensor.shape == self._index_to_param[index].shape:
                state = self.optim.state.get(local.tensor, {})
                return {k: v.shape for k, v in state.items() if isinstance(v, torch.Tensor)}
        return {}
