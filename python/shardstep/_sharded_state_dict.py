"""The state as torch.distributed.checkpoint takes it: each rank's own part, nothing gathered."""

from typing import TYPE_CHECKING, Any

from shardstep._param_groups import ParamGroup
from shardstep._sharded_optimizer import ShardedOptimizer

if TYPE_CHECKING:  # torch.distributed.checkpoint takes time to import, and few need it
    from shardstep._sharded_state import StateTemplates


class ShardedStateDictMethods(ShardedOptimizer):
    """sharded_state_dict and load_sharded_state_dict."""

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, for torch.distributed.checkpoint to save or load into.

        Nothing is gathered or copied: loading writes into the state that there is, and makes what
        there is not yet. Hand what was loaded to load_sharded_state_dict.
        """
        from shardstep._sharded_state import shard_values

        self._push_options()
        states = self.optim.state_dict()["state"]
        templates = self._state_templates(self.param_groups)
        params = self._index_to_param
        state = {}
        for position, (group, local) in enumerate(self._local_by_group()):
            state[str(local.index)] = (
                shard_values(local, params[local.index], states[position])
                if position in states
                else templates.values(local, params[local.index], group)
            )
        # DCP takes a tuple as one value, which it loads as it was, whatever there is now.
        extra = tuple((k, v) for k, v in states.items() if not isinstance(k, int))
        return {"state": state, "param_groups": tuple(self._packed_groups()), "extra": extra}

    def load_sharded_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a dict of sharded_state_dict that torch.distributed.checkpoint has loaded into.

        It may have been saved at another world size and sharding. Raises ValueError that names what
        does not fit.
        """
        from shardstep._sharded_state import ShardedState

        groups, _ = self._fitting_groups(state_dict)
        templates = self._state_templates(groups)
        own = {}
        for group, local in self._local_by_group():
            values = {
                name: value.local() if isinstance(value, ShardedState) else value
                for name, value in state_dict["state"][str(local.index)].items()
            }
            if all(value is None for value in values.values()):
                continue  # there was no state of this parameter
            missing = templates.names(local, group) - values.keys()
            if missing:
                raise ValueError(
                    f"shardstep: expected {', '.join(sorted(missing))} of parameter {local.index} "
                    f"in the state, as the options of its group ask for, got {', '.join(values)} "
                    f"{self._where()}"
                )
            own[local.index] = values
        self._take(groups, own, dict(state_dict["extra"]))
        self._finish_loading(groups)

    def _state_templates(self, groups: list[ParamGroup]) -> "StateTemplates":
        from shardstep._sharded_state import StateTemplates

        by_element = self._sharding == "element"
        return StateTemplates(self._optimizer_class, self._arguments, groups, by_element)
