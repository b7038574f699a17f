"""Param groups: how they are divided among the ranks, and given to local optimizers."""

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from shardstep._C import ShardEngine
from shardstep._checkpoint_content import parameter_names
from shardstep._cost import costs_of
from shardstep._elementwise import refuse_lbfgs
from shardstep._errors import telling_every_rank
from shardstep._gradients import GradientMethods
from shardstep._group_settings import GroupSettings, take_settings
from shardstep._module import describe_module
from shardstep._param_groups import ParamGroup, describe, parse_param_group
from shardstep._several_optimizers import SeveralOptimizers, keep_groups, members_of


class GroupMethods(GradientMethods):
    """add_param_group, and what the constructor needs of it."""

    _own_options: ClassVar[frozenset[str]]
    """Names of the constructor's arguments that are not the local optimizer's."""
    _default_settings: GroupSettings
    """Of groups that name nothing of their own."""
    _cost_pools: list[tuple[Any, ...] | None]
    _members: list[GroupSettings]
    """What the local optimizers were made from, if there are several."""

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Adds a group and divides its parameters among the ranks, given what each already owns.

        Collective.
        """
        if not self.initialized:  # torch's constructor calls this too
            super().add_param_group(param_group)
            return
        known = len(self._listed)
        with telling_every_rank(lambda error: self._adopt_groups(known, error), self._where()):
            self._push_options()  # which may have changed since the last step
            group = parse_param_group(param_group, known, self._own_options)
            settings = take_settings(group, self._default_settings)
            settings.check()
            self._settings.append(settings)
            self._add_group(group, settings)
        self._pull_options()

    def _add_group(self, group: ParamGroup, settings: GroupSettings) -> None:
        # Our defaults are those of another class.
        defaults, self.defaults = self.defaults, {} if settings.is_own else self.defaults
        try:
            super().add_param_group(group)
        finally:
            self.defaults = defaults

    def _make_local_optimizers(self, known: int) -> None:
        """Gives the groups from `known` on to local optimizers, which are made where missing."""
        groups = self._local_groups(known)
        several = any(settings.is_own for settings in self._settings)
        if not several and known == 0:
            self.optim = self._default_settings.make(groups)
        elif not several:
            for group in groups:
                self.optim.add_param_group(group)
        else:
            self._add_to_several(groups, known)

    def _add_to_several(self, groups: list[ParamGroup], known: int) -> None:
        settings = self._settings[known:]
        if known == 0:
            self.optim = SeveralOptimizers(settings[0].make(groups[:1]), 1)
            self._members = [settings[0]]
            groups, settings = groups[1:], settings[1:]
        elif not isinstance(self.optim, SeveralOptimizers):
            self.optim = SeveralOptimizers(self.optim, known)
            self._members = [self._default_settings]
        for group, wanted in zip(groups, settings, strict=True):
            for number, made in enumerate(self._members):
                if made.makes_the_same_as(wanted):
                    self.optim.add_group_to(number, group)
                    break
            else:
                self.optim.add_member(wanted.make([group]))
                self._members.append(wanted)

    def _number_of_pool(self, pool: tuple[Any, ...] | None) -> int:
        if pool not in self._cost_pools:
            self._cost_pools.append(pool)
        return self._cost_pools.index(pool)

    def _adopt_first_groups(self, error: str | None) -> None:
        if error is not None:  # any engine tells the others
            self.engine = ShardEngine(self.process_group)
            self.param_groups = []
            self._settings = []
        self._adopt_groups(0, error)

    def _adopt_groups(self, known: int, error: str | None) -> None:
        """Adds the groups from `known` on to the engine; if a rank fails, removes all of them."""
        forget = self._forget_later_groups(known)
        new = self.param_groups[known:]
        of_module = describe_module(self._module) if known == 0 else ""
        groups = []
        try:
            for group, settings in zip(new, self._settings[known:], strict=True):
                params = list(dict.fromkeys(group["params"]))
                described = describe(settings.optimizer_class, {**settings.arguments, **group})
                names = parameter_names(params, [group], self._module)
                costs = costs_of(params, settings.cost)
                pool = self._number_of_pool(settings.cost_pool)
                described += of_module
                groups.append((params, described, names, costs, pool, settings.sharding))
        except Exception as caught:
            error = error or f"{type(caught).__name__}: {caught}"
        refusal: Exception | None = None

        def use() -> str | None:
            nonlocal refusal
            try:
                self._use_groups(known)
            except Exception as caught:
                refusal = caught
                return f"{type(caught).__name__}: {caught}"
            return None

        try:
            self.engine.add_groups(groups, error, use)
        except Exception:
            forget()
            if refusal is not None:
                raise refusal from None
            raise
        self._make_stand_ins()

    def _use_groups(self, known: int) -> None:
        """Makes local optimizers of groups that the engine has divided.

        An optimizer may refuse a parameter that only one rank owns.
        """
        for number, group in enumerate(self.param_groups[known:], known):
            for param in group["params"]:
                if param not in self._index_of:
                    self._index_of[param] = len(self._index_of)
                    self._group_of.append(number)
            self._listed.append(list(group["params"]))
            # A parameter that is listed twice is updated twice, as torch.optim does.
            times = Counter(self._index_of[param] for param in group["params"])
            local = self.engine.local_params(number)
            self._local_by_group.append([own for own in local for _ in range(times[own.index])])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*duplicate parameters")  # our groups have warned
            self._make_local_optimizers(known)
        for member in members_of(self.optim):
            if isinstance(member, torch.optim.LBFGS):
                refuse_lbfgs(type(member))

    def _forget_later_groups(self, known: int) -> Callable[[], None]:
        """Returns a function that takes back what has been made of groups from `known` on."""
        known_params, known_pools = len(self._index_of), len(self._cost_pools)
        optim = getattr(self, "optim", None)
        members = list(self._members)
        restore = None if optim is None else keep_groups(optim)

        def forget() -> None:
            for groups in (self.param_groups, self._listed, self._settings, self._local_by_group):
                del groups[known:]
            for param in list(self._index_of)[known_params:]:
                del self._index_of[param]
            del self._group_of[known_params:]
            del self._cost_pools[known_pools:]
            self._members = members
            if optim is not None and restore is not None:
                restore()
                self.optim = optim

        return forget

    def _local_groups(self, known: int) -> list[ParamGroup]:
        return [
            {**group, "params": [local.tensor for local in self._local_by_group[g]]}
            for g, group in enumerate(self.param_groups[known:], known)
        ]
