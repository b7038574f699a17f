"""The ranks of a contestant: processes on Gloo, one thread each, that run given functions."""

import ctypes
import datetime
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

TIMEOUT = 600


def fork_context():
    """Processes forked from one that has torch loaded."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.optim", "shardstep"])
    return context


def slowest(*seconds: float) -> list[float]:
    """Milliseconds on the slowest rank. Collective."""
    import torch
    import torch.distributed as dist

    milliseconds = torch.tensor(seconds, dtype=torch.float64) * 1e3
    dist.all_reduce(milliseconds, dist.ReduceOp.MAX)
    return milliseconds.tolist()


def _enter(network: str, interface: str) -> None:
    """Moves this thread, and those it starts later, into a network namespace."""
    clone_newnet = 0x40000000
    libc = ctypes.CDLL(None, use_errno=True)
    with open(network) as file:
        if libc.setns(file.fileno(), clone_newnet) != 0:
            raise OSError(ctypes.get_errno(), f"setns({network})")
    os.environ["GLOO_SOCKET_IFNAME"] = interface


def _rank_main(
    pipe, store: str, rank: int, world_size: int, make: Callable, arguments, network
) -> None:
    import torch
    import torch.distributed as dist

    if network is not None:
        _enter(*network)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    contestant = make(*arguments)
    while (order := pipe.recv()) is not None:
        pipe.send(getattr(contestant, order[0])(*order[1:]))
    dist.destroy_process_group()


class Ranks:
    """Each process makes a contestant by make(*arguments), in its network (file, interface)."""

    def __init__(
        self,
        context,
        world_size: int,
        make: Callable,
        arguments: Iterable[Any],
        networks: list[tuple[str, str]] | None = None,
    ):
        self.name = f"{make.__name__}{tuple(map(str, arguments))}"
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            store = f"{self.folder.name}/store"
            process = context.Process(
                target=_rank_main,
                args=(
                    *(theirs, store, rank, world_size, make, tuple(arguments)),
                    networks[rank] if networks else None,
                ),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def order(self, method: str, *arguments: Any) -> list[Any]:
        """What the contestant's method returned on each rank."""
        for pipe in self.pipes:
            pipe.send((method, *arguments))
        deadline = time.monotonic() + TIMEOUT
        try:
            waits = ((pipe, max(0.0, deadline - time.monotonic())) for pipe in self.pipes)
            results = [pipe.recv() for pipe, wait in waits if pipe.poll(wait)]
        except EOFError:
            results = []
        if len(results) < len(self.pipes):
            raise SystemExit(f"{self.name} failed")
        return results

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind, *_: Any) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if kind is None:
                pipe.send(None)
                process.join(10)
            process.kill()
            process.join()
        self.folder.cleanup()
