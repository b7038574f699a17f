"""Trainers from PyPI, unchanged, on 2 CPU ranks: both stages train, clip, accumulate, save and
resume as torch's AdamW under DistributedDataParallel does.

Stage 1 must end with the same bits. Stage 2 sums a clipped norm in another order, so its parameters
may differ in the last bits.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("programs.py")
CASES = [
    ("transformers", "transformers", ()),
    ("transformers", "transformers", ("bf16",)),
    ("accelerate", "accelerate", ()),
    ("accelerate", "accelerate", ("bf16",)),
    ("lightning", "lightning", ()),
    ("lightning", "lightning", ("bf16",)),
    ("fabric", "lightning", ()),
    ("fabric", "lightning", ("bf16",)),
    ("foreign_optimizer", "pytorch-optimizer", ()),
]
TOLERANCE = {"stage1": 0.0, "stage2": 1e-5}


def run(trainer: str, kind: str, folder: Path, options) -> list[dict]:
    """What each rank wrote."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(PROGRAM), trainer, kind, str(folder), *options]
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    result = subprocess.run(
        command,
        env={**os.environ, **offline},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return [torch.load(folder / f"{kind}.{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The reference run of each case, made once."""
    made: dict = {}

    def get(trainer: str, options) -> dict:
        if (trainer, options) not in made:
            folder = tmp_path_factory.mktemp("plain")
            made[trainer, options] = run(trainer, "plain", folder, options)[0]
        return made[trainer, options]

    return get


@pytest.mark.parametrize("kind", ["stage1", "stage2"])
@pytest.mark.parametrize(
    "trainer, package, options", CASES, ids=["-".join((t, *o)) for t, _, o in CASES]
)
def test_trains_as_the_plain_optimizer(plain, trainer, package, options, kind, tmp_path):
    expected = plain(trainer, options)
    # With autocast, gradients pass through bfloat16, where the last bit is worth more.
    tolerance = TOLERANCE[kind] * (100 if "bf16" in options else 1)
    for rank in run(trainer, kind, tmp_path, options):
        for part in ("whole", "resumed"):
            assert rank[part].keys() == expected[part].keys()
            for name, tensor in expected[part].items():
                what = f"{name} of the {part} run"
                found = rank[part][name]
                torch.testing.assert_close(found, tensor, rtol=0, atol=tolerance, msg=what)
