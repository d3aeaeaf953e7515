"""Where a verification stops: twice, and the second time inside a later epoch wherever there is a way to it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrun.errors import UsageError
from shardrun.run.stops import DEFAULT_WINDOWS, Stops, plan_stops


@given(total=st.integers(3, 400), per_epoch=st.integers(1, 200), most=st.integers(3, 60))
def test_stops_lie_apart_and_the_second_is_inside_a_later_epoch(total: int, per_epoch: int, most: int) -> None:
    plan = plan_stops(total, per_epoch, most=most)
    first, second = plan.stops
    assert plan.end == min(total, most)
    assert 0 < first < second < plan.end
    assert 0 <= plan.first < per_epoch
    if per_epoch > 1:
        assert plan.inside(second)
        assert plan.epoch(second) >= 2
    assert Stops.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@given(epochs=st.integers(2, 5), per_epoch=st.integers(1, 100), most=st.integers(3, 60))
def test_a_run_of_whole_epochs_is_long_enough_for_its_plan(epochs: int, per_epoch: int, most: int) -> None:
    total = epochs * per_epoch
    if total >= 3:
        plan = plan_stops(total, per_epoch, most=most)
        assert plan.first + plan.end <= total


def test_a_long_epoch_is_entered_near_its_end() -> None:
    plan = plan_stops(300, 167, most=DEFAULT_WINDOWS)
    assert (plan.end, plan.stops, plan.first) == (18, (6, 12), 158)
    assert [(plan.epoch(stop), plan.inside(stop)) for stop in plan.stops] == [(1, True), (2, True)]


def test_a_run_of_one_epoch_begins_at_its_beginning() -> None:
    plan = plan_stops(100, 100, most=18, one_epoch=True)
    assert (plan.first, plan.stops) == (0, (6, 12))


def test_a_whole_run_is_taken_where_no_limit_is_given() -> None:
    assert plan_stops(90, 30, most=None).end == 90
    assert plan_stops(None, 30, most=18).end == 18


@pytest.mark.parametrize("total", [1, 2])
def test_a_run_without_room_for_two_stops_is_refused(total: int) -> None:
    with pytest.raises(UsageError, match=f"a run of {total} window"):
        plan_stops(total, 10, most=18)
