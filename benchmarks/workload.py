"""What the Python benchmarks train, and what they measure of a rank's process."""

import gc
import os
import socket
import struct
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def make_model(name: str, rank: int = 0, layers: int = 20):
    """The model, which is the same on every rank, and a function that makes a loss of it."""
    import torch

    torch.manual_seed(0)
    if name in ("linear", "tiny"):
        width = 2000 if name == "linear" else 64
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
        torch.manual_seed(1 + rank)
        inputs, targets = torch.randn(2, 20, width)
        return model, lambda forward: (forward(inputs) - targets).square().mean()
    sys.path.insert(0, str(ROOT / "examples"))
    from train_gpt import Gpt

    model = Gpt(vocabulary_size=256, layers=12, width=512, heads=8, context=32)
    tokens = torch.randint(256, (2, 33))

    def loss(forward):
        scores = forward(tokens[:, :-1])
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())

    return model, loss


def proc_bytes(file: str, field: str) -> int:
    for line in Path("/proc/self", file).read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/{file} has no {field}")


class ExtraMemory:
    """By how much the resident set has grown at its peak since this was made."""

    def __init__(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        self._before = proc_bytes("status", "VmRSS")

    def bytes(self) -> int:
        return proc_bytes("status", "VmHWM") - self._before


def tcp_bytes_sent() -> int:
    """By all sockets of this process that are open now."""
    sent = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                    sent += struct.unpack_from("Q", info, 200)[0]  # tcpi_bytes_sent
        except OSError:  # listdir's own descriptor; listening sockets
            continue
    return sent
