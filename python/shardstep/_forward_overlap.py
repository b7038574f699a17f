"""Parameters that are still being sent when the next forward begins (`overlap_forward`): code that
reads or writes one through its module waits for it."""

import copy
import weakref
from collections.abc import ItemsView, Iterable, Iterator, ValuesView
from typing import Any

import torch

from shardstep._C import ShardEngine

Parameters = dict[str, torch.nn.Parameter | None]


class Arrivals:
    """Which parameters may not have arrived yet."""

    def __init__(self, index_of: dict[Any, int]) -> None:
        self._index_of = index_of
        self._pending: set[int] = set()
        # The engine receives the parameters even if the optimizer no longer exists.
        self._engine: ShardEngine | None = None

    def expect_all(self, engine: ShardEngine) -> None:
        self._pending = set(self._index_of.values())
        self._engine = engine

    def forget(self) -> None:
        """Call when all have arrived."""
        self._pending.clear()
        self._engine = None

    def wait_for(self, parameters: Iterable[Any]) -> None:
        indices = [self._index_of.get(parameter, -1) for parameter in parameters]
        indices = [index for index in indices if index in self._pending]
        if not indices or self._engine is None:
            return
        self._engine.wait_for(indices)
        self._pending.difference_update(indices)
        if not self._pending:
            self._engine = None

    def wait_but_for(self, parameters: set[Any]) -> None:
        """Waits for all parameters except these."""
        self.wait_for([p for p in self._index_of if p not in parameters])


class WaitingParameters(Parameters):
    """A module's own parameters by name. torch looks them up here to access, list, save or load
    them; a copy is an ordinary dict."""

    arrivals: Arrivals

    def __getitem__(self, name: str) -> torch.nn.Parameter | None:
        parameter = super().__getitem__(name)
        if self.arrivals._pending:
            self.arrivals.wait_for([parameter])
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        self._wait()
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self._wait()
        return super().pop(name, *default)

    def values(self) -> ValuesView[torch.nn.Parameter | None]:  # type: ignore[override]
        self._wait()
        return super().values()

    def items(self) -> ItemsView[str, torch.nn.Parameter | None]:  # type: ignore[override]
        self._wait()
        return super().items()

    def __iter__(self) -> Iterator[str]:  # else dict(this) would bypass the methods above
        return super().__iter__()

    def copy(self) -> Parameters:
        return dict(self.items())

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameters:
        return copy.deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, iter(self.copy().items())

    def _wait(self) -> None:
        if self.arrivals._pending:
            self.arrivals.wait_for(super().values())


class _BeforeForward:
    """A hook of the root: waits for the parameters that none of its modules waits for."""

    def __init__(self, arrivals: Arrivals | None) -> None:
        # The module outlives the optimizer in many programs.
        self._arrivals = None if arrivals is None else weakref.ref(arrivals)

    def __call__(self, root: torch.nn.Module, *_: Any) -> None:
        arrivals = None if self._arrivals is None else self._arrivals()
        if arrivals is not None and arrivals._pending:
            arrivals.wait_but_for(_watch(root, arrivals))

    def __reduce__(self) -> Any:
        """A copy of the module has parameters of its own, which no rank sends."""
        return _BeforeForward, (None,)


def wait_in(root: torch.nn.Module, arrivals: Arrivals) -> None:
    """Makes every module of `root` wait for its parameters when they are accessed.

    Parameters that no module of it lists, and those of scripted modules, are waited for before the
    root's forward.
    """
    _watch(root, arrivals)
    root.register_forward_pre_hook(_BeforeForward(arrivals))


def _watch(root: torch.nn.Module, arrivals: Arrivals) -> set[Any]:
    """Makes the modules of `root` wait, new ones too. Returns the parameters that they list."""
    known: set[Any] = set()
    for module in root.modules():
        parameters = module.__dict__.get("_parameters")
        if type(parameters) is dict and parameters:
            module.__dict__["_parameters"] = parameters = WaitingParameters(parameters)
        if isinstance(parameters, WaitingParameters):
            parameters.arrivals = arrivals
            known.update(dict.values(parameters))
    return known
