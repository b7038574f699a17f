"""`optimizer.state`: the local optimizer's state, by the parameters that the user knows.

The local optimizer may update parts or copies of parameters (by element, masters), and its state
has these as keys.
"""

from collections import defaultdict
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

LocalTensors = dict[torch.Tensor, torch.Tensor | None]


class StateView(MutableMapping[Any, Any]):
    """What this rank holds of the state. A parameter that belongs to other ranks has none here,
    and what is set for it is ignored; elsewhere the owner gets it."""

    def __init__(self, data: dict[Any, Any], local: LocalTensors, where: str) -> None:
        """`local` has, by parameter, the key in `data` if this rank owns some of it."""
        self._data, self._local, self._where = data, local, where
        self._parameter_of = {key: param for param, key in local.items() if key is not None}

    @classmethod
    def of(cls, values: Any, local: LocalTensors, where: str) -> "StateView":
        """A view of new state that has these values."""
        view = cls(defaultdict(dict), local, where)
        view.update(values)
        return view

    @property
    def data(self) -> dict[Any, Any]:
        return self._data

    @property
    def local(self) -> LocalTensors:
        return self._local

    def _is_elsewhere(self, key: Any) -> bool:
        return isinstance(key, torch.Tensor) and key in self._local and self._local[key] is None

    def _key(self, key: Any) -> Any:
        return self._local.get(key, key) if isinstance(key, torch.Tensor) else key

    def __getitem__(self, key: Any) -> Any:
        return {} if self._is_elsewhere(key) else self._data[self._key(key)]

    def __setitem__(self, key: Any, values: Any) -> None:
        if self._is_elsewhere(key):
            return
        own = self._key(key)
        if own is not key:
            self._check_shapes(own, values)
        self._data[own] = values

    def _check_shapes(self, own: torch.Tensor, values: Any) -> None:
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape != own.shape:
                raise ValueError(
                    f"shardstep: expected '{name}' of a parameter's state to have the shape of "
                    f"this rank's part, {tuple(own.shape)}, got {tuple(value.shape)}; give whole "
                    f"state to load_state_dict() {self._where}"
                )

    def __delitem__(self, key: Any) -> None:
        if not self._is_elsewhere(key):
            del self._data[self._key(key)]

    def __contains__(self, key: Any) -> bool:
        return not self._is_elsewhere(key) and self._key(key) in self._data

    def get(self, key: Any, default: Any = None) -> Any:
        return default if self._is_elsewhere(key) else self._data.get(self._key(key), default)

    def pop(self, key: Any, *default: Any) -> Any:
        return self._data.pop(self._key(key), *default)

    def clear(self) -> None:
        self._data.clear()

    def __iter__(self) -> Iterator[Any]:
        for key in self._data:
            yield self._parameter_of.get(key, key) if isinstance(key, torch.Tensor) else key

    def __len__(self) -> int:
        return len(self._data)

    def __repr__(self) -> str:
        return f"StateView({dict(self.items())!r})"
