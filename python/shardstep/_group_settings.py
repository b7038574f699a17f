"""What a param group may name for itself: its optimizer, sharding and cost."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from shardstep._cost import Cost, own_cost
from shardstep._elementwise import check_optimizer_class, is_known_elementwise
from shardstep._param_groups import ParamGroup, options_of, unwrapped

GROUP_KEYS = frozenset(["optimizer_class", "sharding", "cost"])


@dataclasses.dataclass(frozen=True)
class GroupSettings:
    """How one param group is optimized and divided."""

    optimizer_class: Callable[..., Optimizer]
    arguments: dict[str, Any]
    """Arguments of the class besides the parameters."""
    sharding: str
    cost: Cost | None
    cost_pool: tuple[Any, ...] | None
    """Groups whose costs can be compared have the same; None: cost counts elements."""
    is_known_elementwise: bool
    is_elementwise: bool
    """Known or declared to be."""
    is_own: bool
    """Whether the group names an optimizer of its own."""

    def check(self) -> None:
        """Raises ValueError for an optimizer that would train differently when sharded so."""
        check_optimizer_class(self.optimizer_class, self.sharding, self.is_elementwise)

    def makes_the_same_as(self, other: "GroupSettings") -> bool:
        """Whether one optimizer can have the groups of both."""
        return self.optimizer_class is other.optimizer_class and (
            self.arguments is other.arguments or self.arguments == other.arguments
        )

    def make(self, groups: list[ParamGroup]) -> Optimizer:
        return self.optimizer_class(groups, **self.arguments)


def default_settings(
    optimizer_class: Callable[..., Optimizer],
    arguments: dict[str, Any],
    sharding: str,
    cost: Cost | None,
    elementwise: bool,
) -> GroupSettings:
    """What groups have that name nothing."""
    known = is_known_elementwise(optimizer_class)
    return _with_cost(
        GroupSettings(
            optimizer_class, arguments, sharding, None, None, known, known or elementwise, False
        ),
        cost,
    )


def take_settings(group: ParamGroup, default: GroupSettings) -> GroupSettings:
    """Removes a group's settings from it."""
    given = {key: group.pop(key) for key in GROUP_KEYS if key in group}
    settings = default
    if "optimizer_class" in given:
        cls = given["optimizer_class"]
        known = is_known_elementwise(cls)
        settings = GroupSettings(
            optimizer_class=cls,
            arguments=_required_arguments(cls, group),
            sharding=default.sharding if known else "parameter",
            cost=None,
            cost_pool=None,
            is_known_elementwise=known,
            is_elementwise=known,
            is_own=True,
        )
        settings = _with_cost(settings, None)
    if "sharding" in given:
        settings = dataclasses.replace(settings, sharding=given["sharding"])
    if "cost" in given:
        settings = _with_cost(settings, given["cost"])
    return settings


def _with_cost(settings: GroupSettings, cost: Cost | None) -> GroupSettings:
    used = cost if cost is not None else own_cost(settings.optimizer_class)
    pool = None if used is None else (unwrapped(settings.optimizer_class)[0], cost)
    return dataclasses.replace(settings, cost=used, cost_pool=pool)


def _required_arguments(optimizer_class: Any, group: ParamGroup) -> dict[str, Any]:
    """Those of the group's options that the class cannot be made without."""
    try:
        parameters = list(inspect.signature(unwrapped(optimizer_class)[0]).parameters.values())[1:]
    except (TypeError, ValueError):
        return {}
    options = options_of(group)
    return {
        p.name: options[p.name]
        for p in parameters
        if p.default is inspect.Parameter.empty and p.name in options
    }
