"""Long tests run only where SHARDSTEP_FULL is set: `make test FULL=1`."""

import os

import pytest


def pytest_collection_modifyitems(items):
    if not os.environ.get("SHARDSTEP_FULL"):
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="runs with make test FULL=1"))
