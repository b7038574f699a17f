"""Random sequences of ordinary operations end as they do with the plain optimizer under DDP.

Equal to the bit where sums are taken in the same order, else within the tolerance that player.py
states. An error is a failure, unless player.py says that the operation may be refused: then all
ranks must refuse it. So is a rank that waits for more than LIMIT seconds. The seed is printed at
the end of the run (SHARDSTEP_SEED=… repeats it), and what fails is shrunk to a short program.
"""

import os
import tempfile
import time

import hypothesis
import pytest
from full_run import FULL, SEED
from player import play
from programs import Program, programs
from ranks import RankError, run_ranks

# For each number of ranks. SHARDSTEP_SEQUENCES is for long searches.
SEQUENCES = {"handed": 20, "ddp": 25, "stage2": 35}
IN_A_FULL_RUN = int(os.environ.get("SHARDSTEP_SEQUENCES") or 250)
LIMIT = 60  # seconds per sequence, also on a machine that is busy
SHRINKING = 300 if FULL else 60  # seconds


def problems_of(program: Program, world_size: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = run_ranks(world_size, play, program, folder, timeout=LIMIT, keep_group=True)
        except RankError as error:
            return str(error)
    return "\n".join(f"rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("mode", ["stage2", "ddp", "handed"])
def test_equals_the_plain_optimizer(mode, world_size):
    failed: dict[Program, str] = {}
    stop_shrinking = 0.0

    @hypothesis.seed(SEED)
    @hypothesis.settings(
        max_examples=IN_A_FULL_RUN if FULL else SEQUENCES[mode],
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(programs(mode))
    def check(program):
        nonlocal stop_shrinking
        if failed and program not in failed and time.monotonic() > stop_shrinking:
            return  # what is known by now is short enough
        problems = failed.get(program) or problems_of(program, world_size)
        if problems and not failed:
            stop_shrinking = time.monotonic() + SHRINKING
        if problems:
            failed[program] = problems
        assert not problems, problems

    check()
