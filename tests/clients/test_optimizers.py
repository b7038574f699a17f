"""Optimizers from PyPI inside ours: in both stages and shardings they train, save and resume as
they do under DistributedDataParallel, or are refused before training starts."""

import importlib.metadata
import sys

import pytest
from conftest import ORDER
from optimizers import ELEMENTWISE, KINDS, OPTIMIZERS
from programs import TOLERANCE, assert_same, run_once

CASES = [(package, name) for package, names in OPTIMIZERS.items() for name in names]
ORDER["optimizers"] = [f"{package}'s {name}" for package, name in CASES]
REFUSAL = "ValueError: shardstep: expected an optimizer that is known to be element-wise"


def version(package: str) -> str:
    places = [f"{sys.prefix}/timm"] if package == "timm" else sys.path
    found = importlib.metadata.distributions(name=package.replace("_", "-"), path=places)
    return next(iter(found)).version


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the ranks of a package's program wrote, made once."""

    once = run_once()
    return lambda package: once("optimizers.py", package, folder=tmp_path_factory.mktemp)


@pytest.mark.parametrize("package, name", CASES, ids=[".".join(case) for case in CASES])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_trains_as_it_does_itself(results, package, name, kind, place):
    fits = kind.endswith("parameter") or f"{package}.{name}" in ELEMENTWISE
    row = f"{package}'s {name}", version(package)
    place("optimizers", row, kind, passed="yes" if fits else "refused")
    for rank, by_kind in enumerate(results(package)):
        expected, found = by_kind["plain"][name], by_kind[kind][name]
        assert not isinstance(expected, str), expected
        if not fits:
            assert str(found).startswith(REFUSAL), found
            continue
        assert not isinstance(found, str), found
        tolerance = TOLERANCE[kind.partition("-")[0]]
        assert_same(found, expected, tolerance, f"rank {rank}")
