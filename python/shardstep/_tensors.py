"""What a tensor is, before anyone takes its memory."""

import torch


def has_memory_of_its_own(tensor: torch.Tensor) -> bool:
    """False for subclasses that answer operations themselves: DTensors, quantized tensors."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def is_plain(value: object) -> bool:
    """Whether a value is a dense tensor that can be viewed and sent as it is."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and has_memory_of_its_own(value)
    )
