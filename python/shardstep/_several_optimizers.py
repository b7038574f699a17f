"""One local optimizer made of several, where param groups name their own."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep._param_groups import ParamGroup


class SeveralOptimizers(Optimizer):
    """Steps each of its members; groups, state and state dicts are those of all, in one order.

    `state` is one dict that the members share. A group dict here is the member's own.
    """

    def __init__(self, first: Optimizer, groups: int) -> None:
        super().__init__([{"params": []}], first.defaults)
        self.members = [first]
        self._of_group = [0] * groups
        self._collect()

    def add_member(self, member: Optimizer) -> int:
        """Returns its number. Its groups are the next ones."""
        self.members.append(member)
        number = len(self.members) - 1
        self._of_group += [number] * len(member.param_groups)
        self._collect()
        return number

    def add_group_to(self, member: int, group: ParamGroup) -> None:
        self.members[member].add_param_group(group)
        self._of_group.append(member)
        self._collect()

    def member_of(self, group: int) -> Optimizer:
        return self.members[self._of_group[group]]

    def _collect(self) -> None:
        """Puts the members' groups in order, and their state into one dict."""
        rest = [iter(member.param_groups) for member in self.members]
        self.param_groups = [next(rest[member]) for member in self._of_group]
        state: Any = defaultdict(dict)
        for member in self.members:
            state.update(member.state)
        self.state = state
        for member in self.members:
            member.state = state

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self.members:
            member.step(**kwargs)
        return loss

    def _positions(self) -> list[list[int]]:
        """By member: where its parameters are among all."""
        positions: list[list[int]] = [[] for _ in self.members]
        first = 0
        for member, group in zip(self._of_group, self.param_groups, strict=True):
            last = first + len(group["params"])
            positions[member] += range(first, last)
            first = last
        return positions

    def state_dict(self) -> dict[str, Any]:
        merged: dict[Any, Any] = {}
        for member, positions in zip(self.members, self._positions(), strict=True):
            shared = member.state
            member.state = self._own_state(member)
            try:
                states = member.state_dict()["state"]
            finally:
                member.state = shared
            for key, values in states.items():
                merged[positions[key] if isinstance(key, int) else key] = values
        return {"state": merged, "param_groups": []}

    def _own_state(self, member: Optimizer) -> Any:
        params = {p for group in member.param_groups for p in group["params"]}
        own: Any = defaultdict(dict)
        own.update({key: value for key, value in self.state.items() if key in params})
        if member is self.members[0]:  # state without a parameter
            own.update({k: v for k, v in self.state.items() if not isinstance(k, torch.Tensor)})
        return own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = [
            [g for of, g in zip(self._of_group, state_dict["param_groups"], strict=True) if of == m]
            for m in range(len(self.members))
        ]
        for number, positions in enumerate(self._positions()):
            place_of = {position: place for place, position in enumerate(positions)}
            state = {
                place_of[k] if isinstance(k, int) else k: v
                for k, v in state_dict["state"].items()
                if k in place_of or (number == 0 and not isinstance(k, int))
            }
            first, renumbered = 0, []
            for group in groups[number]:
                last = first + len(group["params"])
                renumbered.append({**group, "params": range(first, last)})
                first = last
            self.members[number].load_state_dict({"state": state, "param_groups": renumbered})
        self._collect()

    def kept(self) -> Callable[[], None]:
        """Returns a function that undoes later changes of groups and state as a whole."""
        before = [(member, member.state, member.param_groups) for member in self.members]

        def restore() -> None:
            for member, state, groups in before:
                member.state, member.param_groups = state, groups
            self._collect()

        return restore


def members_of(optimizer: Optimizer) -> list[Optimizer]:
    return optimizer.members if isinstance(optimizer, SeveralOptimizers) else [optimizer]


def use_state(optimizer: Optimizer, state: Any) -> None:
    """Replaces the state as a whole."""
    for one in {optimizer, *members_of(optimizer)}:
        one.state = state


def keep_groups(optimizer: Optimizer) -> Callable[[], None]:
    """Returns a function that removes groups and members that are added later."""
    members = list(members_of(optimizer))
    before = [(member, member.state, len(member.param_groups)) for member in members]
    of_group = list(optimizer._of_group) if isinstance(optimizer, SeveralOptimizers) else []

    def restore() -> None:
        for member, state, count in before:
            member.state = state
            del member.param_groups[count:]
        if isinstance(optimizer, SeveralOptimizers):
            optimizer.members, optimizer._of_group = members, of_group
            optimizer._collect()

    return restore


def keep(optimizer: Optimizer) -> Callable[[], None]:
    """Returns a function that undoes later changes of groups and state as a whole."""
    if isinstance(optimizer, SeveralOptimizers):
        return optimizer.kept()
    before = optimizer.state, optimizer.param_groups

    def restore() -> None:
        optimizer.state, optimizer.param_groups = before

    return restore
