"""State that is not a plain tensor, as plain tensors and a description of how they belong together.

An optimizer may keep lists and dicts of tensors (Shampoo's factors, what bitsandbytes' state_dict()
returns) or tensors without storage (torchao's 8-bit states), which say by __tensor_flatten__ what
they consist of. A checkpoint has the tensors inside `exp_avg` as `exp_avg/0`, `exp_avg/1`, …, and
the description as `exp_avg/`.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch

from shardstep._tensors import is_plain


def _has_parts(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and callable(getattr(value, "__tensor_flatten__", None))


def _needs_flattening(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(torch.is_tensor(v) or _needs_flattening(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return any(torch.is_tensor(v) or _needs_flattening(v) for v in value)
    return not is_plain(value) and _has_parts(value)


def _describe(value: Any, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Appends the tensors inside; the description names them by their places."""
    if is_plain(value):
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if _has_parts(value):
        names, context = value.__tensor_flatten__()
        return {
            "class": f"{type(value).__module__}:{type(value).__qualname__}",
            "parts": {name: _describe(getattr(value, name), tensors) for name in names},
            "context": _describe(context, tensors),
            "size": list(value.shape),
            "stride": list(value.stride()),
        }
    if isinstance(value, Mapping):
        pairs = [[key, _describe(item, tensors)] for key, item in value.items()]
        return {"dict": pairs}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_describe(item, tensors) for item in value]}
    return {"value": value}


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state without nested tensors. Nothing is copied."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        if not _needs_flattening(value):
            result[name] = value
            continue
        tensors: list[torch.Tensor] = []
        result[f"{name}/"] = _describe(value, tensors)
        result.update({f"{name}/{place}": tensor for place, tensor in enumerate(tensors)})
    return result


def nested_names(values: Mapping[str, Any]) -> list[str]:
    """What flat() has taken apart."""
    return [name[:-1] for name in values if name.endswith("/")]


def _tensor_class(path: str) -> Any:
    """A class of a module that the program has imported: loading a checkpoint imports nothing."""
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not issubclass(found, torch.Tensor):
        raise ValueError(
            f"shardstep: expected the tensor class {name} of {module}, in which state was saved, "
            "to be imported, got none; import the optimizer's package before loading"
        )
    return found


def _build(node: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
    if "tensor" in node:
        return tensors[node["tensor"]]
    if "class" in node:
        parts = {name: _build(part, tensors) for name, part in node["parts"].items()}
        return _tensor_class(node["class"]).__tensor_unflatten__(
            parts, _build(node["context"], tensors), torch.Size(node["size"]), tuple(node["stride"])
        )
    if "dict" in node:
        return {key: _build(item, tensors) for key, item in node["dict"]}
    if "list" in node:
        return [_build(item, tensors) for item in node["list"]]
    if "tuple" in node:
        return tuple(_build(item, tensors) for item in node["tuple"])
    return node["value"]


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """What flat() was given."""
    names = {name[:-1]: node for name, node in values.items() if name.endswith("/")}
    result: dict[str, Any] = {}
    for key, value in values.items():
        name, slash, _ = key.rpartition("/")
        if not slash or name not in names:
            result[key] = value
        elif name not in result:
            count = sum(1 for other in values if other.rpartition("/")[0] == name) - 1
            tensors = [values[f"{name}/{place}"] for place in range(count)]
            result[name] = _build(names[name], tensors)
    return result
