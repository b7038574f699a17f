"""Optimizer state between the local optimizer's dicts and the engine, which moves it."""

import pickle
from collections.abc import Mapping
from typing import Any

import torch

EngineValues = list[tuple[str, torch.Tensor | bytes]]


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: _on_cpu(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_on_cpu(item) for item in value)
    return value


def to_engine(values: Mapping[str, Any]) -> EngineValues:
    """A parameter's state for the engine: dense tensors as they are, all else as bytes."""
    state: EngineValues = []
    for name, value in values.items():
        if not isinstance(name, str):
            raise TypeError(
                f"shardstep: expected the optimizer's state under names, got the key {name!r}"
            )
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            state.append((name, value.detach()))
        else:
            state.append((name, pickle.dumps(_on_cpu(value))))
    return state


def from_engine(state: EngineValues) -> dict[str, Any]:
    return {
        name: pickle.loads(value) if isinstance(value, bytes) else value for name, value in state
    }
