"""Settings of every test process, and the fixtures that several files share."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from runs import TINY

from tilewise.training import TrainConfig

#: Examples of a long run with new random seeds; 0: the short, fixed run.
FUZZ = int(os.environ.get("TILEWISE_FUZZ", "0"))

settings.register_profile(
    "ci", max_examples=100, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile("long", max_examples=max(FUZZ, 1), deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("long" if FUZZ else "ci")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def texts(tmp_path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.py").write_text(f"def function_{i}(x):\n    return x + {i}\n\n" * (5 + 3 * i))
    return folder


@pytest.fixture
def config(texts) -> TrainConfig:
    return TINY.with_(data=(str(texts),))


@pytest.fixture(scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
