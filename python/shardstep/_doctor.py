"""`shardstep doctor`: what one needs to know of a machine and an installation to help."""

import argparse
import itertools
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardstep import _C, _doctor_ranks
from shardstep._progress import ProgressBar
from shardstep._text import size

_DESCRIPTION = """\
Reports torch and its build, backends, memory and limits; then which ranks share a host and why
not, which exchange is taken, whether training works, and how fast bytes move. Starts two ranks by
itself; where a launcher has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does, it
examines the ranks that were started."""
_EXAMPLES = """
examples:
  shardstep doctor
  shardstep doctor --json
  torchrun --nproc-per-node 4 -m shardstep doctor
  export MASTER_ADDR=localhost MASTER_PORT=29500
  mpirun -np 4 bash -c 'RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE \\
      exec python -m shardstep doctor'

exit status: 0 all is well, 1 training does not work.
"""
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OTHER_LAUNCHERS = {"mpirun": "OMPI_COMM_WORLD_SIZE", "srun": "SLURM_STEP_NUM_TASKS"}


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _kib(text: str | None) -> int | None:
    return int(text.split()[0]) * 1024 if text else None


def _limit(which: int) -> list[int | None]:
    """Soft and hard; None is unlimited."""
    return [
        None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which)
    ]


def _cgroup_memory() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _first_line(path)
        if text and text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def _memfd() -> str:
    try:
        os.close(os.memfd_create("shardstep-doctor"))
    except (AttributeError, OSError) as error:
        return f"fails: {error}"
    return "works"


def host_facts() -> dict[str, Any]:
    """Of this process and its machine; needs no process group."""
    backends = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
    }
    shm = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None
    return {
        "shardstep": _C.version,
        "built_for_torch": _C.torch_version,
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        "torch_cuda": torch.version.cuda,
        "torch_cpu": torch.backends.cpu.get_cpu_capability(),
        "gpus": torch.cuda.device_count() if torch.version.cuda else 0,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "processor": _field("/proc/cpuinfo", "model name"),
        "processors": len(os.sched_getaffinity(0)),
        "backends": backends,
        "memory": _kib(_field("/proc/meminfo", "MemTotal")),
        "memory_available": _kib(_field("/proc/meminfo", "MemAvailable")),
        "memory_cgroup": _cgroup_memory(),
        "memfd": _memfd(),
        "dev_shm": shm,
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "address_space": _limit(resource.RLIMIT_AS),
        "file_size": _limit(resource.RLIMIT_FSIZE),
    }


def _is_launched() -> bool:
    """Whether this process is one of the ranks to examine."""
    missing = [name for name in _LAUNCHED if name not in os.environ]
    if not missing:
        return True
    for launcher, size_name in _OTHER_LAUNCHERS.items():
        started = os.environ.get(size_name, "1")
        if started != "1":  # each of them would start two ranks of its own
            raise ValueError(
                f"shardstep: expected {', '.join(missing)} to be set, because {launcher} started "
                f"{started} processes and torch reads these; `shardstep doctor --help` shows how"
            )
    return False


def _examine_launched() -> dict[str, Any]:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend)
    try:
        return _doctor_ranks.examine()
    finally:
        dist.destroy_process_group()


def _examine_two() -> dict[str, Any]:
    """Starts two ranks, and returns what they found."""
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-m", "shardstep._doctor_ranks", f"{folder}/store"]
        ranks = [
            subprocess.Popen(
                [*program, str(rank), "2"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(2)
        ]
        try:
            outputs = [rank.communicate(timeout=_doctor_ranks.TIMEOUT_SECONDS) for rank in ranks]
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"the two ranks did not end within {_doctor_ranks.TIMEOUT_SECONDS} s"
            ) from None
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    for number, (rank, (_, errors)) in enumerate(zip(ranks, outputs, strict=True)):
        if rank.returncode != 0:
            last = errors.strip().splitlines()[-1:] or ["no output"]
            return {"failed": f"rank {number} of 2 ended with {rank.returncode}: {last[0]}"}
    return json.loads(outputs[0][0])  # type: ignore[no-any-return]


def _groups(opens: list[list[str | None]]) -> list[list[int]]:
    """Ranks that can all open each other's memory, in order."""
    groups: list[list[int]] = []
    for rank in range(len(opens)):
        for group in groups:
            if all(opens[rank][peer] is None and opens[peer][rank] is None for peer in group):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return groups


def _maybe_size(count: int | None) -> str:
    return "unlimited" if count is None else size(count)


def _host_lines(facts: dict[str, Any]) -> Iterator[str]:
    cuda = (
        f"CUDA {facts['torch_cuda']}, {facts['gpus']} GPUs" if facts["torch_cuda"] else "CPU build"
    )
    yield f"shardstep   {facts['shardstep']}, built for torch {facts['built_for_torch']}"
    yield f"torch       {facts['torch']} ({cuda}), git {facts['torch_git'][:12]}"
    yield f"python      {facts['python']}, {facts['system']}, {facts['libc']}"
    count = facts["processors"]
    yield (
        f"processors  {count} available, {facts['processor'] or '?'}; kernels for "
        f"{facts['torch_cpu']}; {facts['threads']} threads per rank"
    )
    yield "backends    " + ", ".join(
        f"{name} {'yes' if there else 'no'}" for name, there in facts["backends"].items()
    )
    memory = f"{_maybe_size(facts['memory_available'])} available of {_maybe_size(facts['memory'])}"
    if facts["memory_cgroup"] is not None:
        memory += f", {size(facts['memory_cgroup'])} for this container"
    yield f"memory      {memory}"
    yield (
        f"shared      memfd_create {facts['memfd']}; /dev/shm, which shardstep does not use, has "
        f"{_maybe_size(facts['dev_shm'])}"
    )
    soft, hard = facts["open_files"]
    file_size, address_space = facts["file_size"][0], facts["address_space"][0]
    yield (
        f"limits      {soft or 'unlimited'} open files (at most {hard or 'unlimited'}); file size "
        f"{_maybe_size(file_size)}; address space {_maybe_size(address_space)}"
    )


def _rank_lines(found: dict[str, Any]) -> Iterator[str]:
    if "failed" in found:
        yield f"self-test   FAILED: {found['failed']}"
        return
    ranks, opens = found["ranks"], found["opens"]
    yield f"ranks       {len(ranks)}, backend {found['backend']}"
    groups = _groups(opens)
    for group in groups:
        names = ", ".join(f"{rank} (pid {ranks[rank]['pid']})" for rank in group)
        yield f"  host {ranks[group[0]]['host']}: ranks {names} share memory"
    for first, second in itertools.pairwise(groups):
        reason = opens[second[0]][first[0]] or opens[first[0]][second[0]]
        yield f"  ranks {first[0]} and {second[0]} do not: {reason}"
    yield f'exchange    "auto" takes {found["exchange"]}'
    for what, outcome in found["checks"].items():
        good = outcome == "ok"
        yield f"self-test   {what}: {'as the plain optimizer' if good else 'FAILED: ' + outcome}"
    speeds = found.get("bandwidth")
    if speeds:
        yield f"bandwidth   {found['backend']}, rank 0 to rank 1: {size(speeds['send'])}/s"
        yield (
            f"            stage 2, {size(speeds['step_bytes'])} of parameters: backward and step "
            f"in {speeds['step_seconds'] * 1e3:.0f} ms, {size(speeds['step'])}/s per rank"
        )


def _run(arguments: argparse.Namespace) -> int:
    launched = _is_launched()
    facts = host_facts()
    if launched:
        found = _examine_launched()
        if int(os.environ["RANK"]) != 0:
            return 0
    else:
        with ProgressBar("starting two ranks"):
            found = _examine_two()
    if arguments.json:
        print(json.dumps({"host": facts, **found}, indent=1))
    else:
        for line in (*_host_lines(facts), *_rank_lines(found)):
            print(line)
    failed = "failed" in found or any(outcome != "ok" for outcome in found["checks"].values())
    return 1 if failed else 0


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "doctor",
        help="report what to paste into a bug report, and test two ranks",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)
