"""The state as torch.distributed.checkpoint takes it: each rank's own part, nothing gathered."""

from typing import TYPE_CHECKING, Any

from shardstep._engine_state import check_divisible
from shardstep._param_groups import ParamGroup, options_of
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
        own, extra = self._local_state()
        templates = self._state_templates(self.param_groups)
        params = self._index_to_param
        state = {}
        for group, locals_ in enumerate(self._local_by_group):
            for local in locals_:
                index, param = local.index, params[local.index]
                if index not in own:
                    state[str(index)] = templates.values(local, param, group)
                    continue
                if self._sharding == "element":
                    check_divisible(index, own[index])
                state[str(index)] = shard_values(local, param, own[index])
        # DCP takes a tuple as one value, which it loads as it was, whatever there is now.
        return {
            "state": state,
            "param_groups": tuple(self._groups_by_index()),
            "extra": tuple(extra.items()),
        }

    def load_sharded_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a dict of sharded_state_dict that torch.distributed.checkpoint has loaded into.

        It may have been saved at another world size and sharding. Raises ValueError that names what
        does not fit.
        """
        from shardstep._sharded_state import loaded_values

        ours = [group["params"] for group in self._groups_by_index()]
        self.engine.match_params([group["params"] for group in state_dict["param_groups"]], ours)
        groups = [options_of(group) for group in state_dict["param_groups"]]
        templates = self._state_templates(groups)
        own = {}
        for group, locals_ in enumerate(self._local_by_group):
            for local in locals_:
                values = loaded_values(state_dict["state"][str(local.index)])
                if values is None:
                    continue  # there was no state of this parameter
                missing = templates.names(local, group) - values.keys()
                if missing:
                    raise ValueError(
                        f"shardstep: expected {', '.join(sorted(missing))} of parameter "
                        f"{local.index} in the state, as the options of its group ask for, got "
                        f"{', '.join(values)} {self._where()}"
                    )
                own[local.index] = values
        self._take(groups, own, dict(state_dict["extra"]))
        self._may_have_state = True
        self._finish_loading(groups)

    def _state_templates(self, groups: list[ParamGroup]) -> "StateTemplates":
        from shardstep._sharded_state import StateTemplates

        by_element = self._sharding == "element"
        return StateTemplates(self._optimizer_class, self._arguments, groups, by_element)
