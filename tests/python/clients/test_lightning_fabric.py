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


def run(sharding, folder):
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), sharding, str(folder)],
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
    return {file.name: torch.load(file, weights_only=True) for file in folder.iterdir()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run("none", tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_trains_saves_and_resumes_as_a_plain_optimizer_does(tmp_path, plain, sharding):
    files = run(sharding, tmp_path)
    assert len(files) == 5
    whole = plain["whole.0.pt"]
    for name in ("whole.0.pt", "whole.1.pt", "resumed.0.pt", "resumed.1.pt"):
        assert_equal(files[name], whole)
    checkpoint, expected = files["half.ckpt"], plain["half.ckpt"]
    assert_equal(checkpoint["optimizer"]["state"], expected["optimizer"]["state"])
    assert checkpoint["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    assert not torch.equal(checkpoint["model"]["0.weight"], whole["0.weight"])
