"""Every test: one thread, deterministic algorithms, the same random numbers."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import random
import sys

import pytest


@pytest.fixture(autouse=True)
def _deterministic(request: pytest.FixtureRequest) -> None:
    """Seed what is loaded; a test that needs no torch stays without it."""
    random.seed(0)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
