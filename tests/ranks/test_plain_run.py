"""A world of one, as a whole run: the bits of a loop of plain torch. tests/gpu has the same on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.plain_run import differing_from_plain_torch


@pytest.mark.parametrize("precision", [{}, {"autocast": "bf16"}, {"matmul": "medium"}])
def test_a_run_of_one_rank_is_a_loop_of_plain_torch(tmp_path: Path, precision: dict[str, str]) -> None:
    assert differing_from_plain_torch(tmp_path, "gloo", "cpu", **precision) == []
