"""The README's example of several groups, on ranks."""

from __future__ import annotations

import pytest

import shardrun as sr
from tests.support.ranks import run_ranks
from tests.unit.test_readme import fenced

_MADE = 'sr.Communicator.from_env() if "RANK" in os.environ else sr.Communicator.single()'


def _experts(comm: sr.Communicator) -> list[tuple[int, float]]:
    printed: list[tuple[int, float]] = []
    text = fenced("python", "The library", 1)
    assert _MADE in text
    names = {"here": comm, "print": lambda *told: printed.append(told)}
    exec(compile(text.replace(_MADE, "here").replace("comm.close()", ""), "README.md", "exec"), names)
    return printed


@pytest.mark.parametrize("world_size", [3, 4])
def test_the_example_with_experts_runs_on_ranks(world_size: int) -> None:
    for printed in run_ranks(world_size, _experts):
        assert [weight for weight, _ in printed] == [32 * world_size] * 3
        assert all(norm > 0 for _, norm in printed)
