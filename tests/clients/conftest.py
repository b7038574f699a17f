"""Writes docs/clients.md from the outcomes, if SHARDSTEP_CLIENTS_TABLE names the file."""

import collections
import datetime
import importlib.metadata
import os
from pathlib import Path

import pytest
import torch

_outcomes: dict[tuple[str, str, str], dict[str, str]] = collections.defaultdict(dict)

_NAMES = {
    "transformers": "HF transformers' Trainer",
    "accelerate": "HF accelerate",
    "lightning": "Lightning's Trainer",
    "fabric": "Lightning Fabric",
    "foreign_optimizer": "optimizers of pytorch_optimizer (Lion, Lamb, Adan) inside ours",
}
_LINES = {
    "transformers": "`trainer.add_callback(ShardstepCallback(trainer))`",
    "accelerate": "`shard_with(accelerator)`",
    "lightning": '`strategy="ddp"`; stage 2: `strategy="shardstep"`',
    "fabric": '`strategy="ddp"`; stage 2: `strategy=FabricStrategy()`',
    "foreign_optimizer": "nothing",
}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.when == "call" and hasattr(item, "callspec"):
        parameters = item.callspec.params
        key = parameters["trainer"], parameters["package"], " ".join(parameters["options"])
        _outcomes[key][parameters["kind"]] = report.outcome


def _row(key: tuple[str, str, str], outcomes: dict[str, str]) -> str:
    trainer, package, options = key
    name = _NAMES[trainer] + (", bfloat16 autocast" if options else "")
    marks = {"passed": "yes", "failed": "**no**"}
    cells = [marks.get(outcomes.get(kind, ""), "not run") for kind in ("stage1", "stage2")]
    version = importlib.metadata.version(package)
    return f"| {name} | {package} {version} | {cells[0]} | {cells[1]} | {_LINES[trainer]} |"


def pytest_sessionfinish(session) -> None:
    path = os.environ.get("SHARDSTEP_CLIENTS_TABLE")
    if not path or not _outcomes:
        return
    rows = "\n".join(_row(key, outcomes) for key, outcomes in _outcomes.items())
    text = f"""# Trainers

The tests of `make test-clients` wrote the rows, on {datetime.date.today()}, with torch
{torch.__version__}: each trainer from PyPI, unchanged, on 2 CPU ranks. *Yes* means that training
with gradient accumulation and clipping, and the run resumed from the trainer's own checkpoint, end
with the parameters of the same two runs with torch's AdamW under DistributedDataParallel: the same
bits in stage 1, within 1e-5 in stage 2, whose norms are summed in another order (1e-3 with
autocast, where a last bit is worth more). HF's two also step a schedule. The last row is training
alone: no accumulation, no clipping, no checkpoint.

| trainer | version | stage 1 | stage 2 | what to add |
|---|---|---|---|---|
{rows}

Why anything must be added: a trainer does not know that a sharded state has to be gathered before
rank 0 saves it, nor that stage 2 averages the gradients itself, without DistributedDataParallel.
The lines come from `shardstep.integrations.transformers`, `.accelerate` and `.lightning`; importing
one needs the trainer's package, and shardstep itself needs none of them.

Other clients are part of `make test`: torch's `Join`, GradScaler and all of torch's schedulers,
torch.distributed.checkpoint, Lion, and subclasses of torch's class (`tests/python/clients`,
`tests/python/zero`). Not tried yet: Ray Train, timm and torchao's and bitsandbytes' optimizers.
"""
    Path(path).write_text(text)
