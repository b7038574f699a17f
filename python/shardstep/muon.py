"""The usual division of a model's parameters between Muon and another optimizer."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from shardstep._checkpoint_content import named_modules
from shardstep._param_groups import ParamGroup


def muon_groups(
    module: nn.Module, *, head: Collection[str] | None = None, **options: Any
) -> list[ParamGroup]:
    """Two param groups: hidden matrices for torch.optim.Muon, and everything else.

    The second group names no optimizer, so it takes the one that ZeroRedundancyOptimizer is given::

        ZeroRedundancyOptimizer(
            muon_groups(model, lr=0.02), torch.optim.AdamW, lr=3e-4, stage=2, sharding="element"
        )

    Muon gets the trainable parameters with two axes, except for embeddings (of nn.Embedding and
    nn.EmbeddingBag), weights that are tied to one, and the output layer. Norms, biases,
    convolutions and all else stay with the other optimizer.

    Args:
        head: names of parameters that belong to the output layer. None: the weight of the last
            nn.Linear, in the order of definition, if the module has more than one.
        options: Muon's, such as lr, momentum and weight_decay.
    """
    embeddings: set[torch.Tensor] = set()
    last_linear: torch.Tensor | None = None
    linears = 0
    named: dict[torch.Tensor, str] = {}
    for prefix, part in named_modules(module):
        for name, param in part._parameters.items():
            if param is not None:
                named.setdefault(param, prefix + name)
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            embeddings.add(part.weight)
        if isinstance(part, nn.Linear):
            last_linear, linears = part.weight, linears + 1
    heads: set[torch.Tensor] = set()
    if head is None:
        if last_linear is not None and linears > 1:
            heads = {last_linear}
    else:
        unknown = set(head) - set(named.values())
        if unknown:
            raise ValueError(
                f"shardstep: expected names of the module's parameters in head, got "
                f"{', '.join(sorted(unknown))}"
            )
        heads = {param for param, name in named.items() if name in head}
    hidden: list[torch.Tensor] = []
    rest: list[torch.Tensor] = []
    for tensor in named:
        is_hidden = tensor.dim() == 2 and tensor.requires_grad
        is_hidden = is_hidden and tensor not in embeddings and tensor not in heads
        (hidden if is_hidden else rest).append(tensor)
    groups: list[ParamGroup] = []
    if hidden:
        groups.append({"params": hidden, "optimizer_class": torch.optim.Muon, **options})
    if rest:
        groups.append({"params": rest})
    return groups
