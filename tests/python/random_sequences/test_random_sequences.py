"""Random sequences of ordinary operations end as they do with the plain optimizer under DDP.

Equal to the bit where sums are taken in the same order, else within the tolerance that player.py
states; an error on any rank is a failure. The seed is printed at the end of the run
(SHARDSTEP_SEED=… repeats it), and what fails is shrunk to a short program.
"""

import tempfile
import time

import hypothesis
import pytest
from full_run import FULL, SEED
from player import play
from programs import Program, programs
from ranks import RankError, run_ranks

# Some sequences still fail in every mode: they belong into the short run once these are mended.
pytestmark = pytest.mark.full

SEQUENCES = 2000 if FULL else 35  # for each mode and number of ranks
SHRINKING = 300 if FULL else 40  # seconds


def problems_of(program: Program, world_size: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = run_ranks(world_size, play, program, folder, timeout=40, keep_group=True)
        except RankError as error:
            return str(error)
    return "\n".join(f"rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "mode",
    ["handed", "ddp", "stage2"],
)
def test_equals_the_plain_optimizer(mode, world_size):
    failed: dict[Program, str] = {}
    stop_shrinking = 0.0

    @hypothesis.seed(SEED)
    @hypothesis.settings(
        max_examples=SEQUENCES,
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
