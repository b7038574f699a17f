"""The states of random generators as tensors, for checkpoints."""

import json
import random
import sys
from typing import Any

import torch


def rng_states(which: bool | str) -> dict[str, torch.Tensor]:
    """Of torch's default generators; "all": also of Python's and NumPy's, if it is loaded."""
    if which not in (True, False, "all"):
        raise ValueError(f'shardstep: expected rng to be True, False or "all", got {which!r}')
    if which is False:
        return {}
    states = {"cpu": torch.get_rng_state()}
    for device in _accelerators():
        states[device] = torch.get_device_module(device).get_rng_state()
    if which == "all":
        states["python"] = _to_tensor(random.getstate())
        if "numpy" in sys.modules:  # what is not loaded has not been used
            states["numpy"] = _to_tensor(_numpy_state())
    return states


def set_rng_states(states: dict[str, torch.Tensor]) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    for device in _accelerators():
        if device in states:
            torch.get_device_module(device).set_rng_state(states[device])
    if "python" in states:
        version, internal, gauss_next = _from_tensor(states["python"])
        random.setstate((version, tuple(internal), gauss_next))
    if "numpy" in states:
        import numpy

        name, keys, *rest = _from_tensor(states["numpy"])
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))


def _accelerators() -> list[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return [] if accelerator is None else [accelerator.type]


def _numpy_state() -> list[Any]:
    import numpy

    state: Any = numpy.random.get_state()
    name, keys, position, has_gauss, gauss = state
    return [name, keys.tolist(), int(position), int(has_gauss), float(gauss)]


def _to_tensor(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_tensor(tensor: torch.Tensor) -> Any:
    return json.loads(bytes(tensor.tolist()))
