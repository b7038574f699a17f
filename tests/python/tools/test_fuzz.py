"""tools/fuzz.py: what an earlier run has found is tried again."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# In place of libFuzzer: an input that says "defect" is one.
PROGRAM = """#!/bin/sh
for argument; do input=$argument; done
! grep -q defect "$input"
"""


@pytest.fixture
def fuzzer(tmp_path):
    spec = importlib.util.spec_from_file_location("fuzz", ROOT / "tools" / "fuzz.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.KEPT = tmp_path / "kept"
    program = tmp_path / "tests/cpp/fuzz/shardstep_fuzzer"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM)
    program.chmod(0o755)
    fuzzer = module.Fuzzer(tmp_path, "pickle")
    yield fuzzer
    fuzzer.close()


def test_what_is_mended_goes_to_the_corpus_and_the_rest_stays_found(fuzzer, capfd):
    (fuzzer.found / "crash-1").write_text("mended by now")
    (fuzzer.found / "crash-2").write_text("still a defect")
    fuzzer.retry_found()
    assert [path.name for path in fuzzer.found.iterdir()] == ["crash-2"]
    assert (fuzzer.corpus / "crash-1").read_text() == "mended by now"
    assert capfd.readouterr().out.startswith("pickle: crash-1 of an earlier run is read or refused")
