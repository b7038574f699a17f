"""The state for torch.distributed.checkpoint: each rank's own part, nothing gathered."""

from typing import TYPE_CHECKING, Any

from shardstep._engine_state import check_divisible
from shardstep._masters import MASTER_KEY, Masters, without_masters
from shardstep._param_groups import ParamGroup, options_of
from shardstep._sharded_optimizer import ShardedOptimizer

if TYPE_CHECKING:  # torch.distributed.checkpoint is slow to import, and few programs need it
    from shardstep._sharded_state import StateTemplates


class ShardedStateDictMethods(ShardedOptimizer):
    """sharded_state_dict and load_sharded_state_dict."""

    def sharded_state_dict(self) -> dict[str, Any]:
        """Returns this rank's part of the state, for torch.distributed.checkpoint to save or fill.

        Nothing is gathered or copied: loading writes into existing state, and creates what does
        not exist yet. Pass the loaded dict to load_sharded_state_dict.
        """
        from shardstep._sharded_state import shard_values

        self._push_options()
        own, extra = self._local_state()
        templates = self._state_templates(self.param_groups)
        params = self._index_to_param
        state = {}
        own, _ = without_masters(own)
        for group, locals_ in enumerate(self._local_by_group):
            for local in locals_:
                index, param = local.index, params[local.index]
                if index in own:
                    if self._by_element(index):
                        check_divisible(index, own[index])
                    values = shard_values(local, param, own[index])
                else:
                    values = templates.values(local, param, group)
                if self.engine.has_master(index):
                    values.update(shard_values(local, param, {MASTER_KEY: local.tensor}))
                state[str(index)] = values
        # DCP treats a tuple as one value, which it loads as saved, whatever its current contents.
        return {
            "state": state,
            "param_groups": tuple(self._groups_by_index()),
            "extra": tuple(extra.items()),
        }

    def load_sharded_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a dict of sharded_state_dict that torch.distributed.checkpoint has filled.

        It may have been saved at another world size and sharding. Raises a ValueError that names
        what does not fit.
        """
        from shardstep._sharded_state import loaded_values

        ours = [group["params"] for group in self._groups_by_index()]
        self.engine.match_params([group["params"] for group in state_dict["param_groups"]], ours)
        groups = [options_of(group) for group in state_dict["param_groups"]]
        templates = self._state_templates(groups)
        own = {}
        masters: Masters = {}
        for group, locals_ in enumerate(self._local_by_group):
            for local in locals_:
                saved = dict(state_dict["state"][str(local.index)])
                master = loaded_values({MASTER_KEY: saved.pop(MASTER_KEY, None)})
                values = loaded_values(saved)
                names = templates.names(local, group)
                if master is not None and (values is not None or not names):
                    masters[local.index] = master[MASTER_KEY].clone()
                if values is None:
                    continue  # this parameter had no state
                missing = names - values.keys()
                if missing:
                    raise ValueError(
                        f"shardstep: expected {', '.join(sorted(missing))} of parameter "
                        f"{local.index} in the state, as the options of its group require, got "
                        f"{', '.join(values)} {self._where()}"
                    )
                own[local.index] = values
        self._take(groups, own, dict(state_dict["extra"]))
        self.engine.load_masters(masters)
        self._may_have_state = True
        self._finish_loading(groups)

    def _state_templates(self, groups: list[ParamGroup]) -> "StateTemplates":
        from shardstep._sharded_state import StateTemplates

        return StateTemplates(self._settings, groups)
