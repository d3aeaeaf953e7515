"""The parts of the rank harness that need no process."""

from __future__ import annotations

import pytest

from tests.support.ranks import Outcome, RankFailed, RanksHung, run_ranks


def test_a_body_must_be_a_function_of_a_module() -> None:
    with pytest.raises((AttributeError, TypeError), match=r"local object|lambda|pickle"):
        run_ranks(1, lambda comm: None)


def test_an_outcome_is_good_only_with_a_report_and_without_an_error() -> None:
    assert Outcome(0, value=None).ok
    assert not Outcome(0, error="Traceback", error_type="ValueError").ok
    assert not Outcome(0, exit_code=0).ok
    assert Outcome(0, exit_code=-9).killed_by == 9
    assert Outcome(0, exit_code=3).killed_by is None


def test_failures_name_rank_and_stack() -> None:
    assert str(RankFailed(2, "ValueError: bad label 7")) == "rank 2 failed:\nValueError: bad label 7"
    message = str(RanksHung(5.0, {1: "  File x\n", 0: "  File y\n"}))
    assert "ranks [0, 1] were not done after 5.0 s" in message
    assert message.index("rank 0 ---") < message.index("rank 1 ---")
