"""Optimizers from PyPI inside ours: in both stages and shardings they train, save and resume as
they do under DistributedDataParallel, or are refused before training starts."""

import functools
import importlib.metadata
import sys

import pytest
from optimizers import ELEMENTWISE, OPTIMIZERS
from programs import TOLERANCE, assert_same, run

CASES = [(package, name) for package, names in OPTIMIZERS.items() for name in names]
KINDS = [f"{stage}-{sharding}" for stage in TOLERANCE for sharding in ("parameter", "element")]
REFUSAL = "ValueError: shardstep: expected an optimizer that is known to be element-wise"


def version(package: str) -> str:
    places = [f"{sys.prefix}/timm"] if package == "timm" else sys.path
    (found,) = importlib.metadata.distributions(name=package.replace("_", "-"), path=places)
    return found.version


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the ranks of a package's program wrote, made once."""

    @functools.cache
    def get(package: str, kind: str) -> list[dict]:
        return run("optimizers.py", package, kind, folder=tmp_path_factory.mktemp(package))

    return get


@pytest.mark.parametrize("package, name", CASES, ids=[".".join(case) for case in CASES])
@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_it_does_itself(results, package, name, kind, place):
    fits = kind.endswith("parameter") or f"{package}.{name}" in ELEMENTWISE
    row = f"{package}'s {name}", version(package)
    place("optimizers", row, kind, passed="yes" if fits else "refused")
    expected = results(package, "plain")
    for rank, found in enumerate(results(package, kind)):
        assert not isinstance(expected[rank][name], str), expected[rank][name]
        if not fits:
            assert str(found[name]).startswith(REFUSAL), found[name]
            continue
        assert not isinstance(found[name], str), found[name]
        tolerance = TOLERANCE[kind.partition("-")[0]]
        assert_same(found[name], expected[rank][name], tolerance, f"rank {rank}")
