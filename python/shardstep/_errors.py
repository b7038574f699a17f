"""How errors end, and how one rank's error is raised on every rank."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def where(rank: int, world_size: int) -> str:
    """The end of an error message: which rank raised it."""
    return f"(rank {rank} of {world_size})"


@contextlib.contextmanager
def telling_every_rank(tell: Callable[[str | None], Any], where: str) -> Iterator[None]:
    """Runs its block, then `tell` with the error that the block raised, or None.

    `tell` is collective and raises on every rank if any rank passed it an error. The rank whose
    block failed raises its own error, with `where`, rather than what `tell` raises.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = _ending_with(where, caught)
    try:
        tell(None if error is None else str(error))
    except Exception as caught:
        raise (error or caught) from None
    if error is not None:
        raise error


def _ending_with(where: str, error: Exception) -> Exception:
    text = str(error)
    ours = text.startswith("shardstep: ") and type(error) in (ValueError, TypeError, RuntimeError)
    return type(error)(f"{text} {where}") if ours and not text.endswith(where) else error
