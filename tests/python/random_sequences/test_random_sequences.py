"""Random sequences of ordinary operations end as they do with the plain optimizer under DDP.

Equal to the bit where sums are taken in the same order, else within the tolerance that player.py
states; an error on any rank is a failure. The seed is printed at the top of the run
(SHARDSTEP_SEED=… repeats it), and what fails is shrunk to a short program.
"""

import tempfile

import hypothesis
import pytest
from full_run import FULL, SEED
from player import play
from programs import programs
from ranks import run_ranks

SEQUENCES = 2000 if FULL else 35  # for each mode and number of ranks


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("mode", ["handed", "ddp", "stage2"])
def test_equals_the_plain_optimizer(mode, world_size):
    @hypothesis.seed(SEED)
    @hypothesis.settings(
        max_examples=SEQUENCES,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(programs(mode))
    def check(program):
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(world_size, play, program, folder, timeout=20, keep_group=True)
        problems = [f"rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts]
        assert not problems, "\n".join(problems)

    check()
