"""`shardrun train` with checkpoint.async, killed while it writes: one of the twenty kills of `make long`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints.program_kills import killed_at_random


@pytest.mark.timeout(300)
def test_killed_while_it_saves_the_real_program_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    (step,) = killed_at_random(tmp_path / "run", kills=1, seed=1)
    assert step > 0
