import implementation
import pytest


def pytest_collection_modifyitems(items):
    if implementation.NAME == "shardstep":
        return
    skip = pytest.mark.skip(reason=f"goes past {implementation.NAME}'s class")
    for item in items:
        if "ours" in item.keywords:
            item.add_marker(skip)
