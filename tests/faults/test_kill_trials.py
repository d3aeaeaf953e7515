"""Kills at any moment of a step, for every strategy, and for strategies in place that the same harness must find wrong.

`make test` has a seeded sample of a few kills each, `make long` a hundred.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults.conftest import Tell, is_long
from tests.faults.subjects import SAFE, UNSAFE
from tests.faults.trials import TIMEOUT_S, WANTED, run_trials
from tests.faults.verdict import HEADER, Trial, phase_counts, row

pytestmark = pytest.mark.sample(3)

_TITLE = f"one of 3 ranks killed, the timeout is {TIMEOUT_S:.0f} s"
_SAMPLE, _LONG = 6, 100
_UNSAFE_SAMPLE, _UNSAFE_LONG = 4, 40


def _told(trials: list[Trial]) -> str:
    return "\n".join(f"{trial.shot} died in {trial.died_in}: {told}" for trial in trials for told in trial.wrong)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", SAFE)
def test_a_kill_at_any_moment_leaves_every_survivor_at_a_whole_step(
    strategy: str, tell: Tell, pytestconfig: pytest.Config
) -> None:
    long = is_long(pytestconfig)
    trials = run_trials(strategy, 1, _LONG if long else _SAMPLE, WANTED if long else None)
    tell(_TITLE, HEADER, row(strategy, trials))
    assert _told(trials) == ""
    assert all(trial.wrong_survivors == 0 for trial in trials)
    if long:
        assert phase_counts(trials) >= Counter(WANTED)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", UNSAFE)
def test_the_same_harness_finds_survivors_of_a_step_in_place_wrong(
    strategy: str, tell: Tell, pytestconfig: pytest.Config
) -> None:
    count, aimed = (_UNSAFE_LONG, None) if is_long(pytestconfig) else (_UNSAFE_SAMPLE, {"gather": 1})
    trials = run_trials(strategy, 1, count, aimed)
    tell(_TITLE, HEADER, row(f"{strategy} (unsafe)", trials))
    assert sum(trial.wrong_survivors for trial in trials) > 0
    assert any("state is not that of step" in told for trial in trials for told in trial.wrong)
