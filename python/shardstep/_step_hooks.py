"""The step hooks of all optimizers, which torch's register_optimizer_step_pre_hook and _post_hook
register: they run for ours, and not again for the local optimizers that it is made of."""

import contextlib
import threading
from collections.abc import Iterator, MutableMapping
from typing import Any

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

_NAMES = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


class _Thread(threading.local):
    hides = False


class _HidingHooks(MutableMapping[int, Any]):
    """torch's hooks, which a thread does not see while it hides them."""

    def __init__(self, hooks: MutableMapping[int, Any]) -> None:
        self.hooks = hooks

    def __getitem__(self, key: int) -> Any:
        return self.hooks[key]

    def __setitem__(self, key: int, hook: Any) -> None:
        self.hooks[key] = hook

    def __delitem__(self, key: int) -> None:
        del self.hooks[key]

    def __iter__(self) -> Iterator[int]:
        return iter(()) if _thread.hides else iter(self.hooks)

    def __len__(self) -> int:
        return 0 if _thread.hides else len(self.hooks)


_thread = _Thread()
_lock = threading.Lock()
_users = 0
# They stay, since a hook that is registered in a local step is removed through them.
_hiding = {name: _HidingHooks({}) for name in _NAMES}


@contextlib.contextmanager
def without_hooks_of_all_optimizers() -> Iterator[None]:
    """torch calls none of them in this thread."""
    _put_in_place()
    try:
        with _hiding_here(True):
            yield
    finally:
        _take_away()


def with_hooks_of_all_optimizers() -> contextlib.AbstractContextManager[None]:
    """torch calls them again: for code of the user's that a local step calls."""
    return _hiding_here(False)


@contextlib.contextmanager
def _hiding_here(hides: bool) -> Iterator[None]:
    before, _thread.hides = _thread.hides, hides
    try:
        yield
    finally:
        _thread.hides = before


def _put_in_place() -> None:
    """From here on torch asks ours, whose hooks other threads see as before."""
    global _users
    with _lock:
        _users += 1
        for name, hiding in _hiding.items():
            if _users == 1 and hasattr(torch_optimizer, name):  # they are torch's private names
                hiding.hooks = getattr(torch_optimizer, name)
                setattr(torch_optimizer, name, hiding)


def _take_away() -> None:
    global _users
    with _lock:
        _users -= 1
        for name, hiding in _hiding.items():
            if _users == 0 and hasattr(torch_optimizer, name):
                setattr(torch_optimizer, name, hiding.hooks)


def has_post_hooks(optimizer: Optimizer) -> bool:
    """Whether code of the user's runs when step() returns."""
    hooks = [
        *getattr(optimizer, "_optimizer_step_post_hooks", {}).values(),
        *getattr(torch_optimizer, _NAMES[1], {}).values(),
    ]
    # The profiler's, which counts steps, is there in many processes.
    return any(getattr(hook, "__module__", None) != "torch.profiler" for hook in hooks)
