"""The part of `shardstep doctor` that runs on ranks: who can open whose memory, which exchange is
taken, does training work, how fast do bytes move. Every function but main is collective."""

import datetime
import errno
import json
import os
import socket
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from shardstep.zero_redundancy_optimizer import ZeroRedundancyOptimizer

TIMEOUT_SECONDS = 120
_TEST_BYTES = 64 << 20
_ROUNDS = 3
_MARK_BYTES = 32


def examine() -> dict[str, Any]:
    """What is known of the default group's ranks, the same on each of them."""
    ranks, opens = _who_opens_what()
    result: dict[str, Any] = {
        "ranks": ranks,
        "backend": dist.get_backend(),
        "opens": opens,
        "exchange": _exchange(),
        "checks": {
            "stage 1": _trains_as_plain(stage=1, sharding="parameter"),
            "stage 2": _trains_as_plain(stage=2, sharding="element"),
        },
    }
    if dist.get_world_size() > 1:
        result["bandwidth"] = {"send": _send_bandwidth(), **_step_bandwidth()}
    return result


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return "?"


def _gather(value: Any) -> list[Any]:
    """Each rank's value, which JSON can represent. torch's all_gather_object needs NumPy."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([text.numel()]))
    longest = int(max(length.item() for length in lengths))
    texts = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
    dist.all_gather(texts, torch.nn.functional.pad(text, (0, longest - text.numel())))
    return [
        json.loads(bytes(found[: int(length.item())].tolist()))
        for found, length in zip(texts, lengths, strict=True)
    ]


def _who_opens_what() -> tuple[list[dict[str, Any]], list[list[str | None]]]:
    """Each rank, and by rank and peer why it cannot open the peer's memory; None if it can."""
    mark = os.urandom(_MARK_BYTES)
    memory = os.memfd_create("shardstep-doctor")
    try:
        os.write(memory, mark)
        mine = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "user": os.getuid(),
            "pid_namespace": _namespace("pid"),
        }
        ranks = _gather({**mine, "fd": memory, "mark": mark.hex()})
        opens = _gather([_why_not(mine, peer) for peer in ranks])
        dist.barrier()  # others may still be reading
    finally:
        os.close(memory)
    shown = [{key: rank[key] for key in mine} for rank in ranks]
    return shown, opens


def _why_not(mine: dict[str, Any], peer: dict[str, Any]) -> str | None:
    path = f"/proc/{peer['pid']}/fd/{peer['fd']}"
    apart = (
        f"{mine['host']} and {peer['host']} are different hosts"
        if mine["host"] != peer["host"]
        else "they are in different PID namespaces (containers)"
        if mine["pid_namespace"] != peer["pid_namespace"]
        else None
    )
    try:
        with open(path, "rb") as file:
            found = file.read(_MARK_BYTES)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            return (
                f"{path}: permission denied; run both ranks as the same user, and not from a "
                "program with capabilities or with the setuid bit"
            )
        return apart or f"{path}: {error.strerror}; is /proc mounted with hidepid?"
    if found.hex() == peer["mark"]:
        return None
    return apart or f"{path} belongs to another process; the ranks are in different containers"


def _exchange() -> str:
    parameter = torch.nn.Parameter(torch.zeros(64))
    return ZeroRedundancyOptimizer([parameter], torch.optim.SGD, lr=0.1, stage=2).engine.exchange


def _trains_as_plain(stage: int, sharding: str) -> str:
    """Compares with the plain optimizer on the averaged gradient; "ok", or what differs."""
    size, world_size = 1000, dist.get_world_size()
    start = torch.linspace(-1, 1, size)
    gradients = [torch.linspace(rank, rank + 1, size) for rank in range(world_size)]
    plain, sharded = (torch.nn.Parameter(start.clone()) for _ in range(2))
    reference = torch.optim.AdamW([plain], lr=0.1)
    optimizer = ZeroRedundancyOptimizer(
        [sharded], torch.optim.AdamW, stage=stage, sharding=sharding, lr=0.1
    )
    for _ in range(2):
        average = torch.stack(gradients).sum(0) / world_size
        plain.grad = average.clone()
        reference.step()
        if stage == 2:
            optimizer.zero_grad()
            torch.autograd.backward((sharded * gradients[dist.get_rank()]).sum())
        else:
            sharded.grad = average.clone()
        optimizer.step()
    difference = (plain - sharded).abs().max().item()
    worst = max(_gather(difference))
    return "ok" if worst < 1e-6 else f"differs from the plain optimizer by {worst}"


def _send_bandwidth() -> float:
    """Bytes per second from rank 0 to rank 1, one message at a time."""
    tensor = torch.zeros(_TEST_BYTES // 4)
    seconds = float("inf")
    for _ in range(_ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
        elif dist.get_rank() == 1:
            dist.recv(tensor, 0)
        seconds = min(seconds, time.perf_counter() - began)
    return _TEST_BYTES / _gather(seconds)[1]  # type: ignore[no-any-return]


def _step_bandwidth() -> dict[str, float]:
    """Milliseconds of backward pass and step of stage 2, and bytes per second of each rank."""
    parameter = torch.nn.Parameter(torch.zeros(_TEST_BYTES // 4))
    optimizer = ZeroRedundancyOptimizer(
        [parameter], torch.optim.SGD, stage=2, sharding="element", lr=0.1, fused=True
    )
    gradient = torch.ones_like(parameter)
    seconds = float("inf")
    for _ in range(_ROUNDS):
        optimizer.zero_grad()
        dist.barrier()
        began = time.perf_counter()
        torch.autograd.backward(parameter, gradient)
        optimizer.step()
        seconds = min(seconds, time.perf_counter() - began)
    slowest = max(_gather(seconds))
    world_size = dist.get_world_size()
    moved = 2 * _TEST_BYTES * (world_size - 1) / world_size
    return {"step_bytes": _TEST_BYTES, "step_seconds": slowest, "step": moved / slowest}


def main(store: str, rank: str, world_size: str) -> None:
    """One of the ranks that doctor starts by itself; rank 0 prints JSON."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=FileStore(store, int(world_size)),
        rank=int(rank),
        world_size=int(world_size),
        timeout=datetime.timedelta(seconds=TIMEOUT_SECONDS),
    )
    result = examine()
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
