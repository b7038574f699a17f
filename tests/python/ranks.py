"""Runs a function on real ranks: processes that communicate over Gloo, or over simccl on the
simulated device, with a time limit.

The processes are reused from test to test, one set per world size, and are forked from a server
that has imported torch. Each call gets a new process group. A set in which anything fails is
killed, and the next call starts another. The function and its arguments are pickled: pass functions
of a module, not lambdas.
"""

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import device as devices
import torch
import torch.distributed as dist

_GRACE = 5.0  # how long other ranks have to fail too, before they are killed
_LIMITS = (resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_NOFILE)
_STACK = signal.SIGUSR1  # asks a rank for the stacks of its threads


class RankError(AssertionError):
    """What went wrong, by rank."""


def _context():
    context = multiprocessing.get_context("forkserver")
    # The first optimizer imports torch._dynamo, which takes seconds.
    torch_modules = ["torch", "torch.distributed.optim", "torch.optim", "torch._dynamo"]
    context.set_forkserver_preload([*torch_modules, "pytest", "shardstep"])
    return context


# In the rank


@contextlib.contextmanager
def _as_if_new() -> Iterator[None]:
    """A call finds the process as the first one did."""
    environment, folder = dict(os.environ), os.getcwd()
    limits = {which: resource.getrlimit(which) for which in _LIMITS}
    torch.manual_seed(0)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        for which, limit in limits.items():
            resource.setrlimit(which, limit)
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
        torch.set_grad_enabled(True)
        if "shardstep" in sys.modules:  # a test may have left install() in effect
            sys.modules["shardstep"].uninstall()


def _call(pipe: Connection, folder: Path, rank: int, world_size: int, call: bytes) -> None:
    """One call; its outcome is sent, and the group lives until every rank has one."""
    timeout, keep_group, path, device, job = pickle.loads(call)
    sys.path[:] = path
    try:
        devices.use(device, rank)
        if dist.is_initialized() and not keep_group:
            dist.destroy_process_group()
        if not dist.is_initialized():
            dist.init_process_group(
                devices.BACKENDS[device],
                store=dist.FileStore(str(folder / "store"), world_size),
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=timeout),
            )
        function, args = pickle.loads(job)
        result = pickle.dumps(("done", function(*args)))
    except BaseException:
        result = pickle.dumps(("failed", traceback.format_exc()))
    pipe.send_bytes(result)
    pipe.recv_bytes()
    gc.collect()  # optimizers in cycles hold on to the group
    if dist.is_initialized() and not keep_group:
        dist.destroy_process_group()


def _rank_main(pipe: Connection, rank: int, world_size: int) -> None:
    faulthandler.register(_STACK, file=2, all_threads=True)
    torch.set_num_threads(1)
    gc.freeze()  # what torch made while it was imported need not be looked through each time
    with contextlib.suppress(EOFError):  # the parent has closed the pipe
        while True:
            folder = Path(os.fsdecode(pipe.recv_bytes()))
            with open(folder / f"stderr.{rank}", "w") as errors:
                os.dup2(errors.fileno(), 2)
            with _as_if_new():
                _call(pipe, folder, rank, world_size, pipe.recv_bytes())
            sys.stderr.flush()
            pipe.send_bytes(b"ready")


# In the test


class _Ranks:
    """Processes of one world size, and the pipes to them."""

    def __init__(self, world_size: int) -> None:
        context = _context()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(theirs, rank, world_size), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def start(self, folder: Path, call: bytes) -> None:
        for pipe in self.pipes:
            pipe.send_bytes(os.fsencode(folder))
            pipe.send_bytes(call)

    def outcomes(self, seconds: float, lost: tuple[int, ...]) -> dict[int, tuple[str, Any]]:
        """What each rank sent within this time; after a failure the others have little more.

        Of a rank in `lost` that it was killed.
        """
        outcomes: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + seconds
        while len(outcomes) < len(self.pipes) and time.monotonic() < deadline:
            waiting = {pipe: r for r, pipe in enumerate(self.pipes) if r not in outcomes}
            for pipe in wait(list(waiting), deadline - time.monotonic()):
                rank = waiting[pipe]
                outcomes[rank] = self._outcome(rank)
                if rank in lost and outcomes[rank] == ("died", -signal.SIGKILL):
                    outcomes[rank] = ("lost", None)
                elif outcomes[rank][0] != "done":
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return outcomes

    def _outcome(self, rank: int) -> tuple[str, Any]:
        try:
            return pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(_GRACE)
            return "died", self.processes[rank].exitcode

    def release(self) -> list[str]:
        """Ranks drop their groups; what went wrong with that."""
        for pipe in self.pipes:
            pipe.send_bytes(b"release")
        deadline = time.monotonic() + 30.0
        problems = []
        for rank, (pipe, process) in enumerate(zip(self.pipes, self.processes, strict=True)):
            try:
                if pipe.poll(max(0.0, deadline - time.monotonic())):
                    pipe.recv_bytes()
                    continue
                problems.append(f"rank {rank}: was still dropping its group")
            except EOFError:
                process.join(_GRACE)
                problems.append(f"rank {rank}: died with {process.exitcode} after the test")
        return problems

    def kill(self, busy: set[int]) -> None:
        """Ends all; those that are busy write down where they are first."""
        for rank in busy:
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, _STACK)
        if busy:
            wait([process.sentinel for process in self.processes], 0.5)
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            process.kill()
            process.join()
            pipe.close()


_living: dict[tuple[int, str], _Ranks] = {}


def run_ranks(
    world_size: int,
    function: Callable,
    *args: Any,
    timeout: float = 60.0,
    lost: tuple[int, ...] = (),
    keep_group: bool = False,
    device: str = devices.NAME,
) -> list[Any]:
    """What function(*args) returned on each rank. The default group is set up around it.

    Ranks in `lost` must get themselves killed; they return None. `keep_group`: the group may be the
    one of the call before, and stays for the next one that says so; that saves most of a short
    call's time. `device`: "cpu" or "sim"; rank r has sim:r as its current device.
    Raises RankError with the traceback of every rank that raised, and the stack of every rank that
    was still running when time was up.
    """
    job = pickle.dumps((function, args))
    ranks = _living.pop((world_size, device), None) or _Ranks(world_size)
    outcomes: dict[int, tuple[str, Any]] = {}
    late: list[str] = []
    reusable = False
    with tempfile.TemporaryDirectory() as folder:
        try:
            ranks.start(Path(folder), pickle.dumps((timeout, keep_group, sys.path, device, job)))
            outcomes = ranks.outcomes(timeout + 2.0, lost)
            if len(outcomes) == world_size and {kind for kind, _ in outcomes.values()} == {"done"}:
                late = ranks.release()
                reusable = not late
        finally:
            if reusable:
                _living[world_size, device] = ranks
            else:
                ranks.kill(set(range(world_size)) - outcomes.keys())
        problems = late + _problems(world_size, outcomes, Path(folder))
    if problems:
        raise RankError("\n".join(problems))
    return [outcomes[rank][1] for rank in range(world_size)]


def _problems(world_size: int, outcomes: dict[int, tuple[str, Any]], folder: Path) -> list[str]:
    problems = []
    for rank in range(world_size):
        kind, what = outcomes.get(rank, ("failed", "was still running"))
        if kind in ("done", "lost"):
            continue
        errors = folder / f"stderr.{rank}"
        said = errors.read_text(errors="replace") if errors.exists() else ""
        what = what if kind == "failed" else f"died with {what}"
        problems.append(f"rank {rank} of {world_size}: {what}\n{said}")
    return problems
