#!/usr/bin/env python3
"""Trains with shardstep and with plain DDP on whatever accelerators there are, and compares.

Run it first on a machine with GPUs:

  torchrun --standalone --nproc-per-node <number of GPUs> -- examples/check_gpu.py

Each rank uses the accelerator of its local rank, or the CPU if there is none. Every check trains
the same small model twice, with shardstep and with DDP and the plain optimizer, and compares the
parameters. Rank 0 prints a line per check and a verdict; the exit status is 0 if all agree.

--device and --backend choose another device and c10d backend.
"""

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import shardstep
import torch
import torch.distributed as dist
from shardstep import ZeroRedundancyOptimizer
from shardstep.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, BATCH, STEPS = 64, 8, 5
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


@dataclass
class Check:
    name: str
    options: dict[str, Any]
    run: Callable[["Check", torch.device], nn.Module]
    hook: Any = None
    max_norm: float | None = None


def make_model(device: torch.device) -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), *layers).to(device)


def loss_of(model: nn.Module, step: int, device: torch.device) -> Tensor:
    """Of a batch of this rank's own."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(BATCH, WIDTH, generator=generator).to(device)
    return (model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean()


def train(model: nn.Module, optimizer: Any, check: Check, device: torch.device) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, device).backward()
        if check.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), check.max_norm)
        if check.hook is None:
            optimizer.step()


def plain(check: Check, device: torch.device) -> nn.Module:
    model = DistributedDataParallel(make_model(device))
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    train(model, optimizer, Check("", {}, plain, max_norm=check.max_norm), device)
    return model.module


def stage_1(check: Check, device: torch.device) -> nn.Module:
    model = DistributedDataParallel(make_model(device), bucket_cap_mb=0.01)
    overlap = {} if check.hook is None else {"overlap_with_ddp": True}
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, **overlap, **check.options, **OPTIONS
    )
    if check.hook is not None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        model.register_comm_hook(None, check.hook(allreduce_hook, model, optimizer))
    train(model, optimizer, check, device)
    return model.module


def stage_2(check: Check, device: torch.device) -> nn.Module:
    model = make_model(device)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        stage=2,
        module=model,
        bucket_cap_mb=0.01,
        **check.options,
        **OPTIONS,
    )
    train(model, optimizer, check, device)
    optimizer.wait()
    return model


def with_checkpoint(check: Check, device: torch.device) -> nn.Module:
    """Saves in the middle, and goes on in a new optimizer; consolidates as well."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)

    def make() -> tuple[nn.Module, ZeroRedundancyOptimizer]:
        model = make_model(device)
        return model, ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, stage=2, module=model, **check.options, **OPTIONS
        )

    model, optimizer = make()
    for step in range(STEPS):
        if step == STEPS // 2:
            optimizer.consolidate_state_dict()
            optimizer.save_checkpoint(folder[0], module=model)
            model, optimizer = make()
            optimizer.load_checkpoint(folder[0], module=model)
        optimizer.zero_grad()
        loss_of(model, step, device).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return model


def checks() -> list[Check]:
    result = []
    for sharding in ("parameter", "element"):
        one = {"sharding": sharding}
        result += [
            Check(f"stage 1 by {sharding}", one, stage_1),
            Check(
                f"stage 1 by {sharding}, flat storage",
                {**one, "parameters_as_bucket_view": True},
                stage_1,
            ),
            Check(f"stage 1 by {sharding}, hook", one, stage_1, hook=hook_with_zero_step),
            Check(
                f"stage 1 by {sharding}, interleaved hook",
                one,
                stage_1,
                hook=hook_with_zero_step_interleaved,
            ),
            Check(f"stage 2 by {sharding}", one, stage_2),
            Check(f"stage 2 by {sharding}, clipped", one, stage_2, max_norm=0.1),
            Check(
                f"stage 2 by {sharding}, overlap_forward",
                {**one, "overlap_forward": True},
                stage_2,
            ),
            Check(f"stage 2 by {sharding}, checkpoint", one, with_checkpoint),
        ]
    return result


def difference(ours: nn.Module, theirs: nn.Module) -> float:
    """The largest, relative to the largest parameter."""
    with torch.no_grad():
        pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
        largest = max(float(q.abs().max()) for _, q in pairs)
        return max(float((p - q).abs().max()) for p, q in pairs) / largest


def run_check(check: Check, device: torch.device, tolerance: float) -> str:
    """Empty if it passed on this rank; else what went wrong."""
    try:
        found = difference(check.run(check, device), plain(check, device))
    except Exception:
        return traceback.format_exc()
    return "" if found <= tolerance else f"parameters differ by {found:.1e} of the largest"


@contextlib.contextmanager
def process_group(device: torch.device, backend: str | None) -> Iterator[None]:
    if "RANK" not in os.environ:  # started alone
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    dist.init_process_group(backend or dist.get_default_backend_for_device(device))
    try:
        yield
    finally:
        dist.destroy_process_group()


def choose_device(name: str | None) -> torch.device:
    """The accelerator of this rank, which becomes the current one; or the CPU."""
    if name is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        name = "cpu" if accelerator is None else accelerator.type
    if name == "cpu":
        return torch.device("cpu")
    count = torch.get_device_module(name).device_count()
    device = torch.device(name, int(os.environ.get("LOCAL_RANK", "0")) % count)
    torch.get_device_module(name).set_device(device)
    return device


def compare_all(device: torch.device, tolerance: float) -> int:
    """Runs all checks on the default group; returns how many failed. Rank 0 prints."""
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    say(
        f"shardstep {shardstep.__version__}, torch {torch.__version__}, "
        f"{dist.get_world_size()} ranks on {device.type}, {dist.get_backend()}",
        flush=True,
    )
    failed = 0
    for check in checks():
        began = time.monotonic()
        problems = [""] * dist.get_world_size()
        dist.all_gather_object(problems, run_check(check, device, tolerance))
        said = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
        failed += bool(said)
        seconds = time.monotonic() - began
        say(f"{'FAILED' if said else 'ok':6} {check.name} ({seconds:.1f} s)", *said, sep="\n")
    total = len(checks())
    works = "does NOT work here" if failed else "works here"
    say(f"verdict: shardstep {works}: {total - failed} of {total} checks agree with DDP")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="cuda, cpu, …; the accelerator if there is one")
    parser.add_argument("--backend", help="of c10d; the default one of the device")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    with process_group(device, arguments.backend):
        return 1 if compare_all(device, arguments.tolerance) else 0


if __name__ == "__main__":
    sys.exit(main())
