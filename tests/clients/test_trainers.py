"""Trainers from PyPI, unchanged, on 2 CPU ranks: both stages train, clip, accumulate, save and
resume as torch's AdamW under DistributedDataParallel does.

Stage 1 must end with the same bits. Stage 2 sums a clipped norm in another order, so its parameters
may differ in the last bits.
"""

import importlib.metadata

import pytest
from conftest import ORDER
from programs import TOLERANCE, assert_same, run_once

TRAINERS = {  # name, package, program, what to add
    "transformers": (
        "HF transformers' Trainer",
        "transformers",
        "trainers.py",
        "`trainer.add_callback(ShardstepCallback(trainer))`",
    ),
    "accelerate": ("HF accelerate", "accelerate", "trainers.py", "`shard_with(accelerator)`"),
    "lightning": (
        "Lightning's Trainer",
        "lightning",
        "trainers.py",
        '`strategy="ddp"`; stage 2: `strategy="shardstep"`',
    ),
    "fabric": (
        "Lightning Fabric",
        "lightning",
        "trainers.py",
        '`strategy="ddp"`; stage 2: `strategy=FabricStrategy()`',
    ),
    "ray": (
        "Ray Train",
        "ray",
        "loops.py",
        "`consolidate_state_dict()` before rank 0 saves; stage 2: `prepare_model(model, "
        "parallel_strategy=None)`",
    ),
    "join": (
        "torch's `Join`",
        "torch",
        "loops.py",
        "`Join([ddp, optimizer])`; stage 2: `Join([optimizer])`",
    ),
    "dcp": (
        "torch.distributed.checkpoint",
        "torch",
        "loops.py",
        "`sharded_state_dict()` and `load_sharded_state_dict()`",
    ),
}
CASES = [(trainer, options) for trainer in TRAINERS for options in ((), ("bf16",))]


def row_of(trainer: str, options) -> str:
    return TRAINERS[trainer][0] + (", bfloat16 autocast" if options else "")


ORDER["trainers"] = [row_of(*case) for case in CASES]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the ranks of a trainer's program wrote, made once."""

    once = run_once()

    def get(trainer: str, options) -> list[dict]:
        program = TRAINERS[trainer][2]
        folder = tmp_path_factory.mktemp
        return once(program, trainer, *options, folder=folder, alone=trainer == "ray")

    return get


@pytest.mark.parametrize("kind", ["stage1", "stage2"])
@pytest.mark.parametrize("trainer, options", CASES, ids=["-".join((t, *o)) for t, o in CASES])
def test_trains_as_the_plain_optimizer(results, trainer, options, kind, place):
    _, package, _, note = TRAINERS[trainer]
    row = row_of(trainer, options), f"{package} {importlib.metadata.version(package)}"
    place("trainers", row, kind, note=note)
    # With autocast, gradients pass through bfloat16, where the last bit is worth more.
    tolerance = TOLERANCE[kind] * (100 if "bf16" in options else 1)
    for rank, found in enumerate(results(trainer, options)):
        assert_same(found[kind], found["plain"], tolerance, f"rank {rank}")
