"""Values in `extra`: the user's own, and the states of schedulers, in the form that the engine
takes and that JSON can hold."""

import sys
from collections import Counter, OrderedDict
from typing import Any

_MAPPING = "shardstep.mapping"  # marks a mapping that is not a dict with strings as keys
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {
    kind.__name__: kind for kind in (dict, Counter, OrderedDict)
}
_DEEPEST = 100  # more than the engine takes


def without_numpy(value: Any, what: str, depth: int = 0) -> Any:
    """The value with Python's numbers instead of NumPy's.

    Raises ValueError for a string that UTF-8 cannot encode; `what` names the value.
    """
    value = _python_number(value)
    if type(value) is str:
        _check_text(value, what)
    elif depth > _DEEPEST:
        return value  # the engine refuses it
    elif type(value) in (list, tuple):
        items = enumerate(value)
        return type(value)(without_numpy(item, f"{what}[{i}]", depth + 1) for i, item in items)
    elif type(value) is dict:
        return {
            key: without_numpy(item, _name_in(what, key), depth + 1) for key, item in value.items()
        }
    return value


def _python_number(value: Any) -> Any:
    numpy = sys.modules.get("numpy")  # what is not loaded has made no numbers
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def _name_in(what: str, key: Any) -> str:
    if type(key) is str:
        _check_text(key, f"a key of {what}")
    return f"{what}.{key}"


def _check_text(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"shardstep: cannot save {what}: expected a string that UTF-8 can encode, got {text!a}"
        ) from None


def with_marked_mappings(value: Any) -> Any:
    """A scheduler's state without Counters, OrderedDicts and keys that are not strings.

    They become {"shardstep.mapping": "Counter", "items": [[key, value], ...]}.
    """
    if type(value) in (list, tuple):
        return type(value)(with_marked_mappings(item) for item in value)
    if type(value) not in _MAPPINGS.values():
        return value
    items = {key: with_marked_mappings(item) for key, item in value.items()}
    if type(value) is dict and _MAPPING not in items and all(type(key) is str for key in items):
        return items
    pairs = [[with_marked_mappings(key), item] for key, item in items.items()]
    return {_MAPPING: type(value).__name__, "items": pairs}


def without_marked_mappings(value: Any) -> Any:
    """What with_marked_mappings() got."""
    if type(value) in (list, tuple):
        return type(value)(without_marked_mappings(item) for item in value)
    if type(value) is not dict:
        return value
    if _MAPPING not in value:
        return {key: without_marked_mappings(item) for key, item in value.items()}
    kind = _MAPPINGS.get(value[_MAPPING])
    if kind is None:
        raise ValueError(
            f"shardstep: expected a mapping of {', '.join(_MAPPINGS)} in a scheduler's state, got "
            f"{value[_MAPPING]}; load it with the version of shardstep that saved it"
        )
    items = without_marked_mappings(value["items"])
    return kind({key: item for key, item in items})
