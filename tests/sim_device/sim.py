"""The simulated accelerator "sim" and its c10d backend "simccl", for tests (see sim_device.h).

activate() makes them known to torch in this process, before its first backward pass; `torch.sim` is
this module. After that, `torch.device("sim")` and `dist.init_process_group("simccl")` work.
"""

import contextlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_ROOT = Path(__file__).resolve().parents[2]
_FOLDER = _ROOT / os.environ.get("SHARDSTEP_BUILD_DIR", "build") / "tests"


def _load() -> Any:
    path = _FOLDER / f"_sim_device{sysconfig.get_config_var('EXT_SUFFIX')}"
    spec = importlib.util.spec_from_file_location("_sim_device", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_device = _load()
current_device = _device.current_device
traffic = _device.traffic


def activate() -> None:
    if hasattr(torch, "sim"):
        return
    _device.activate()
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("simccl", _make_simccl, extended_api=True, devices=["sim"])


def _make_simccl(options, _) -> Any:
    return _device.make_simccl(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.global_ranks_in_group,
    )


def _index(device: Any = None) -> int:
    if device is None:
        return current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    return current_device() if index is None else index


# What torch asks of a device's module


def device_count() -> int:
    return _device.device_count


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def set_device(device: Any) -> None:
    _device.set_device(_index(device))


class device:
    """Makes a device the current one for a while."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._index)

    def __exit__(self, *_: Any) -> None:
        set_device(self._before)


Stream, Event = torch.Stream, torch.Event


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Makes a stream the current one for a while."""
    if stream is None:
        yield
        return
    before = current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def synchronize(device: Any = None) -> None:
    _device.synchronize(_index(device))


def _generator(device: Any) -> torch.Generator:
    return _device.default_generator(_index(device))


def manual_seed_all(seed: int) -> None:
    for device in range(device_count()):
        _generator(device).manual_seed(seed)


def manual_seed(seed: int) -> None:
    _generator(None).manual_seed(seed)


def get_rng_state(device: Any = "sim") -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: Any = "sim") -> None:
    _generator(device).set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# What tests ask


def memory_allocated(device: Any = None) -> int:
    return _device.memory_allocated(_index(device))


def max_memory_allocated(device: Any = None) -> int:
    return _device.max_memory_allocated(_index(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    _device.reset_peak_memory_stats(_index(device))


def host_syncs(device: Any = None) -> int:
    """How often the host waited for this device so far."""
    return sum(_device.host_syncs(_index(device)))


def stream_waits(device: Any = None) -> int:
    """How often the default stream of this device waited for a collective under way."""
    return _device.stream_waits(_index(device))
