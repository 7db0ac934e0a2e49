"""Tests that need a GPU: skipped, with this reason, where there is none."""

import pytest
from lane import BACKENDS, HAS_GPU


def pytest_collection_modifyitems(items):
    if not HAS_GPU:
        for item in items:
            if "tests/gpu/" in item.nodeid or item.path.parent.name == "gpu":
                item.add_marker(pytest.mark.skip(reason="PyTorch finds no GPU here"))


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    """Each GPU backend in turn."""
    return request.param
