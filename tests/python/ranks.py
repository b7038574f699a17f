"""Runs a function on real ranks: processes that meet over Gloo, with a time limit.

The processes are forked from a server that has torch imported, so starting them is cheap. The
function and its arguments are pickled: give functions of a module, not lambdas.
"""

import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_GRACE = 5.0  # how long other ranks have to fail too, before they are killed


class RankError(AssertionError):
    """What went wrong, by rank."""


def _context():
    context = multiprocessing.get_context("forkserver")
    # The first optimizer imports torch._dynamo, which takes seconds.
    torch_modules = ["torch", "torch.distributed.optim", "torch.optim", "torch._dynamo"]
    context.set_forkserver_preload([*torch_modules, "pytest", "shardstep"])
    return context


def _rank_main(pipe, folder, rank, world_size, timeout, function, args):
    with open(Path(folder) / f"stderr.{rank}", "w") as errors:
        os.dup2(errors.fileno(), 2)
    faulthandler.dump_traceback_later(timeout)
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(Path(folder) / "store"), world_size)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout),
        )
        torch.manual_seed(0)
        result = pickle.dumps(("done", function(*args)))
    except BaseException:
        pipe.send_bytes(pickle.dumps(("failed", traceback.format_exc())))
        return
    pipe.send_bytes(result)
    pipe.poll(timeout)  # connections stay open until every rank is done


def run_ranks(
    world_size: int,
    function: Callable,
    *args: Any,
    timeout: float = 60.0,
    lost: tuple[int, ...] = (),
) -> list[Any]:
    """What function(*args) returned on each rank. The default group is set up around it.

    Ranks in `lost` must get themselves killed; they return None.
    Raises RankError with the traceback of every rank that raised, and the stack of every rank that
    was still running when time was up.
    """
    context = _context()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(theirs, folder, rank, world_size, timeout, function, args),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        outcomes: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout + 2.0
        while len(outcomes) < world_size and time.monotonic() < deadline:
            waiting = {pipes[r]: r for r in range(world_size) if r not in outcomes}
            for pipe in wait(list(waiting), deadline - time.monotonic()):
                rank = waiting[pipe]
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    processes[rank].join(_GRACE)
                    outcomes[rank] = ("failed", f"died with {processes[rank].exitcode}")
                    if rank in lost and processes[rank].exitcode == -signal.SIGKILL:
                        outcomes[rank] = ("done", None)
                if outcomes[rank][0] == "failed":
                    deadline = min(deadline, time.monotonic() + _GRACE)
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.close()
            process.join(0.0 if len(outcomes) < world_size else _GRACE)
            if process.is_alive():
                process.kill()
                process.join()
        _raise_if_any_failed(world_size, outcomes, Path(folder))
        return [outcomes[rank][1] for rank in range(world_size)]


def _raise_if_any_failed(world_size, outcomes, folder):
    reports = []
    for rank in range(world_size):
        kind, what = outcomes.get(rank, ("failed", "was still running"))
        if kind == "failed":
            errors = folder / f"stderr.{rank}"
            said = errors.read_text() if errors.exists() else ""
            reports.append(f"rank {rank} of {world_size}: {what}\n{said}")
    if reports:
        raise RankError("\n".join(reports))
