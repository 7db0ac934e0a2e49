"""Settings of every test process."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

FUZZ = int(
    os.environ.get("TILEWISE_FUZZ", "0")
)  # examples of a long run with new random seeds; 0: the short, fixed run

settings.register_profile(
    "ci", max_examples=100, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile("long", max_examples=max(FUZZ, 1), deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("long" if FUZZ else "ci")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
