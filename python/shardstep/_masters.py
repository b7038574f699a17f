"""Float32 masters of narrow parameters, in the optimizer's state. The engine has the masters."""

from collections.abc import Mapping
from typing import Any

import torch

from shardstep import _C

MASTER_KEY = _C.master_key

Masters = dict[int, torch.Tensor | None]
"""By parameter; None where there is a state without a master."""


def without_masters(
    state: Mapping[int, dict[str, Any]],
) -> tuple[dict[int, dict[str, Any]], Masters]:
    """The local optimizer's own state, and the masters. Nothing is modified."""
    rest: dict[int, dict[str, Any]] = {}
    masters: Masters = {}
    for index, values in state.items():
        masters[index] = values.get(MASTER_KEY)
        own = {key: value for key, value in values.items() if key != MASTER_KEY}
        if own or MASTER_KEY not in values:
            rest[index] = own
    return rest, masters
