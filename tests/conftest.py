"""Every test: one thread, deterministic algorithms, the same random numbers."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import random
import sys
from collections import defaultdict

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of modules marked `sample(n)` keep n tests, always the same ones; SHARDRUN_LONG=1, or a file by itself: all."""
    if os.environ.get("SHARDRUN_LONG") or len({item.nodeid.partition("::")[0] for item in items}) == 1:
        return
    marked: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") is not None:
            marked[item.nodeid.partition("::")[0]].append(item)
    left_out: list[pytest.Item] = []
    for module, members in marked.items():
        marker = members[0].get_closest_marker("sample")
        assert marker is not None
        kept = random.Random(module).sample(members, min(marker.args[0], len(members)))
        left_out += [item for item in members if item not in kept]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


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
