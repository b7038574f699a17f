"""Converts optimizer state between the local optimizer's dicts and the engine, which moves it."""

import io
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shardstep._tensors import is_plain

EngineValues = list[tuple[str, torch.Tensor | bytes]]


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: _on_cpu(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_on_cpu(item) for item in value)
    return value


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(item)


def _to_bytes(value: Any) -> bytes:
    if next(_tensors_in(value), None) is None:
        return pickle.dumps(value)
    # A pickle of a tensor whose dtype is younger than typed storages, float8, cannot be loaded.
    file = io.BytesIO()
    torch.save(_on_cpu(value), file)
    return file.getvalue()


def _from_bytes(value: bytes) -> Any:
    if value.startswith(b"PK"):  # torch.save's files are zip archives
        return torch.load(io.BytesIO(value), weights_only=False)
    return pickle.loads(value)


def check_divisible(index: int, values: Mapping[str, Any]) -> None:
    """Raises TypeError for state of a slice that cannot be reassembled into a whole."""
    for name, value in values.items():
        if is_plain(value):
            continue
        for tensor in _tensors_in(value):
            if tensor.dim() > 0:
                kind = type(tensor if value is tensor else value).__name__
                raise TypeError(
                    f"shardstep: expected {name} of parameter {index} to be a dense tensor when "
                    f"sharding by element, got {kind}; shard by parameter"
                )


def to_engine(values: Mapping[str, Any]) -> EngineValues:
    """A parameter's state for the engine: dense tensors unchanged, everything else as bytes."""
    state: EngineValues = []
    for name, value in values.items():
        if not isinstance(name, str):
            raise TypeError(
                f"shardstep: expected strings as keys of the optimizer's state, got {name!r}"
            )
        if is_plain(value):
            state.append((name, value.detach()))
        else:
            state.append((name, _to_bytes(value)))
    return state


def from_engine(state: EngineValues) -> dict[str, Any]:
    return {
        name: _from_bytes(value) if isinstance(value, bytes) else value for name, value in state
    }
