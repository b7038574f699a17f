"""Which tests a short run skips, and the seed that selects the others.

`make test FULL=1` sets SHARDSTEP_FULL=1. SHARDSTEP_SEED repeats a run's selection; conftest.py
draws one if it is not set.
"""

import os
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

FULL = os.environ.get("SHARDSTEP_FULL", "") not in ("", "0")
SEED = int(os.environ.get("SHARDSTEP_SEED") or 0)


def sample(everything: Sequence[T], count: int) -> list[T]:
    """All of it in a full run, else so many, chosen by the seed, in their order."""
    if FULL or count >= len(everything):
        return list(everything)
    chosen = random.Random(SEED).sample(range(len(everything)), count)
    return [everything[index] for index in sorted(chosen)]
