"""Lightning Fabric with strategy ddp on 2 CPU processes, saving and loading through Fabric."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_train_gpt import environment
from training import SHARDINGS, assert_equal

PROGRAM = Path(__file__).with_name("fabric_program.py")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What the program wrote for a plain optimizer and for each sharding."""
    folder = tmp_path_factory.mktemp("fabric")
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), str(folder), "none", *SHARDINGS],
        env=environment() | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            _, errors = process.communicate(timeout=240)
        finally:
            # Fabric starts rank 1 by itself, which would outlive rank 0.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    return {
        run.name: {file.name: torch.load(file, weights_only=True) for file in run.iterdir()}
        for run in folder.iterdir()
    }


@pytest.mark.part(1)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_trains_saves_and_resumes_as_a_plain_optimizer_does(runs, sharding):
    files, plain = runs[sharding], runs["none"]
    assert len(files) == 5
    whole = plain["whole.0.pt"]
    for name in ("whole.0.pt", "whole.1.pt", "resumed.0.pt", "resumed.1.pt"):
        assert_equal(files[name], whole)
    checkpoint, expected = files["half.ckpt"], plain["half.ckpt"]
    assert_equal(checkpoint["optimizer"]["state"], expected["optimizer"]["state"])
    assert checkpoint["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    assert not torch.equal(checkpoint["model"]["0.weight"], whole["0.weight"])
