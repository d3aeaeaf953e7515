"""Ranks that ask for different things, or bring NaN: all refuse together, nothing has changed, and all go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import shardrun as sr
from shardrun.comm.faults import plan
from tests.faults.conftest import Outcomes
from tests.faults.scenes import GOOD_STEPS, Told, ask_otherwise, bring_nan, suffer
from tests.faults.subjects import SAFE, Subject, digest_of, make_subject
from tests.faults.test_faults import MAIN, STREAMED
from tests.support.ranks import run_ranks, start_ranks

_VICTIM = 1
_SHARDED = [(strategy, world_size) for strategy in ("zero1", "zero2", STREAMED, "joint") for world_size in (2, 3)]

in_the_main_ones = pytest.mark.parametrize(("strategy", "world_size"), MAIN)
where_it_steps = pytest.mark.parametrize(("strategy", "world_size"), _SHARDED)
pytestmark = pytest.mark.sampled


def _check_refused(attempts: list[tuple[Told, Told]], kinds: set[str], *named: str) -> None:
    """All refused alike, with all that is `named`; then all made the step as if nothing had been."""
    for told, after in attempts:
        assert told.kind in kinds, told
        assert told.changed == [], "gradients too"
        assert told.whole
        assert not told.poisoned
        for text in named:
            assert text in told.message
        assert after.kind == ""
        assert after.whole
        assert after.steps == GOOD_STEPS + 1
    assert len({told.message for told, _ in attempts}) == 1


def _asks(subject: Subject, **asked: Any) -> None:
    subject.step(**asked)


def _sums(subject: Subject) -> None:
    subject.send()
    if isinstance(subject.session, sr.SelectedDataParallel):
        subject.session.sum(local_active=True)
    else:
        subject.session.step_sum(local_active=True)


def _counts_otherwise(subject: Subject) -> None:
    """As after a record of another step."""
    holder = getattr(subject.session, "_reduction", subject.session)
    holder.step_count += 1
    try:
        subject.step()
    finally:
        holder.step_count -= 1


def _broadcasts(subject: Subject) -> None:
    subject.comm.broadcast_(torch.zeros(5), "a tensor of mine")


def _saves(subject: Subject) -> None:
    subject.comm.agree("save of mine", {"step": 2})


def _makes_a_session(subject: Subject) -> None:
    sr.DataParallel(subject.comm, subject.model)


def _cuts_a_subgroup(subject: Subject) -> None:
    subject.comm.subgroup([0])


_DIFFERENT: dict[str, tuple[Callable[[Subject], None], tuple[str, ...]]] = {
    "policy": (partial(_asks, missing="zero"), ("missing error", "missing zero")),
    "weight": (partial(_asks, local_weight=-1), ("rank 1: weight is -1",)),
    "mode": (_sums, ("mode mean", "mode sum")),
    "step": (_counts_otherwise, ("rank 0 in ", " 3", "rank 1 in ", " 4")),
    "operation: broadcast": (
        _broadcasts,
        ("rank 0 in ", "rank 1 in broadcast: a tensor of mine torch.float32 5 from 0"),
    ),
    "operation: agree": (_saves, ("rank 0 in ", "rank 1 in agree: save of mine")),
    "operation: set-up": (_makes_a_session, ("rank 0 in ", "rank 1 in ")),
    "operation: subgroup": (_cuts_a_subgroup, ("rank 0 in ", "rank 1 in subgroup")),
}


@in_the_main_ones
@pytest.mark.parametrize("what", _DIFFERENT)
def test_a_rank_that_asks_for_something_else_is_refused_by_all(
    what: str, strategy: str, world_size: int, ended: Outcomes
) -> None:
    act, named = _DIFFERENT[what]
    attempts = run_ranks(world_size, ask_otherwise, strategy, _VICTIM, act, debug="OFF")
    _check_refused(attempts, {"StepRefused", "CallMismatch"}, *named)
    seconds = max(told.seconds for told, _ in attempts)
    ended(f"14 another {what} on one rank", f"{strategy} {world_size}", "refused by all, then all go on", seconds)


def _steps_another(comm: sr.Communicator, strategy: str) -> tuple[str, list[str], bool, float]:
    """Rank 1 steps another session, which differs in its values and stands on a subgroup of all; then all step both."""
    everybody = comm.subgroup(comm.ranks)
    assert everybody is not None
    on = [(comm, 1), (everybody, 2)]
    first, second = (make_subject(strategy, group, seed) for group, seed in on)
    twins = [make_subject(strategy, group, seed) for group, seed in on]
    for subject in (first, second, *twins):
        subject.backward()
    for twin in twins:
        twin.step()
    before = [first.look(), second.look()]
    began = time.monotonic()
    with pytest.raises(sr.errors.CallMismatch) as caught:
        (second if comm.rank == _VICTIM else first).step()
    seconds = time.monotonic() - began
    changed = [what for old, held in zip(before, (first, second), strict=True) for what in old.differences(held.look())]
    for subject in (first, second):
        subject.step()
    held, right = ([digest_of(one.look()) for one in pair] for pair in ((first, second), twins))
    return str(caught.value), changed, held == right, seconds


@in_the_main_ones
def test_another_session_of_the_same_shapes_is_refused_by_all(strategy: str, world_size: int, ended: Outcomes) -> None:
    ranks = run_ranks(world_size, _steps_another, strategy, debug="OFF")
    for message, changed, right, _ in ranks:
        assert message.startswith("the ranks are in different operations and nothing was sent: rank 0 ")
        assert "session 1, layout " in message
        assert "session 1.1, layout " in message
        assert changed == []
        assert right
    seconds = max(seconds for *_, seconds in ranks)
    ended("14 another session on one rank", f"{strategy} {world_size}", "refused by all, then all go on", seconds)


@where_it_steps
@pytest.mark.parametrize(
    ("asked", "named"), [({"lr": 0.5}, "lr 0x1.0"), ({"max_grad_norm": 2.0}, "max_grad_norm 0x1.0")]
)
def test_other_options_on_one_rank_are_refused_by_all(
    asked: dict[str, Any], named: str, strategy: str, world_size: int, ended: Outcomes
) -> None:
    attempts = run_ranks(world_size, ask_otherwise, strategy, _VICTIM, partial(_asks, **asked), debug="OFF")
    _check_refused(attempts, {"StepRefused"}, "rank 0: ", "rank 1: ", named)
    seconds = max(told.seconds for told, _ in attempts)
    what = f"14 another {next(iter(asked))} on one rank"
    ended(what, f"{strategy} {world_size}", "refused by all, then all go on", seconds)


def _lies(place: str, subject: Subject) -> None:
    plan(f"lie rank {_VICTIM} about fingerprint at {place}").install(subject.comm)
    subject.step()


@pytest.mark.parametrize(
    ("strategy", "world_size", "place"),
    [(strategy, size, "agree:1") for strategy in SAFE for size in (2, 3)]
    + [(strategy, size, "decide:1") for strategy, size in _SHARDED if strategy != STREAMED],  # they are spent by then
)
def test_another_fingerprint_is_refused_by_all(strategy: str, world_size: int, place: str, ended: Outcomes) -> None:
    attempts = run_ranks(world_size, ask_otherwise, strategy, _VICTIM, partial(_lies, place), debug="OFF")
    _check_refused(
        attempts, {"CallMismatch"}, "the ranks are in different operations and nothing was sent", "rank 0 in "
    )
    seconds = max(told.seconds for told, _ in attempts)
    ended("14 another fingerprint from one rank", f"{strategy} {world_size}", "refused by all, then all go on", seconds)


@in_the_main_ones
def test_another_fingerprint_in_the_vote_is_a_failed_vote(strategy: str, world_size: int, ended: Outcomes) -> None:
    """What was gathered stands on the gradients by then, so that nobody could go on as if nothing had been."""
    text = f"lie rank {_VICTIM} about fingerprint at vote"
    with start_ranks(world_size, suffer, strategy, text, comm_timeout_s=20, debug="OFF") as ranks:
        every: list[Told] = [outcome.value for outcome in ranks.collect(60)]
    for told in every:
        assert (told.kind, told.phase, told.in_doubt, told.poisoned) == ("StepFailed", "vote", True, True)
        assert told.culprit is None, "all see the same, and nobody can say who it was"
        assert told.whole
        assert told.steps == GOOD_STEPS
        assert "the ranks are in different operations" in told.message
    seconds = max(told.seconds for told in every)
    ended("4 another fingerprint in the vote", f"{strategy} {world_size}", "as before the step, in doubt", seconds)


@in_the_main_ones
def test_one_no_in_the_vote_keeps_everybody_before_the_step(strategy: str, world_size: int, ended: Outcomes) -> None:
    text = f"lie rank {_VICTIM} about vote at vote"
    with start_ranks(world_size, suffer, strategy, text, comm_timeout_s=20, debug="OFF") as ranks:
        every: list[Told] = [outcome.value for outcome in ranks.collect(60)]
    for told in every:
        assert (told.kind, told.phase, told.in_doubt, told.poisoned) == ("StepFailed", "vote", True, True)
        assert told.culprit is None, "all see the same, and nobody can say who it was"
        assert told.whole
        assert told.steps == GOOD_STEPS
        assert f"{world_size - 1} of {world_size} ranks" in told.message
    ended(
        "4 a no in the vote", f"{strategy} {world_size}", "as before the step, in doubt", max(t.seconds for t in every)
    )


@where_it_steps
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("path", ["a", "m", "h"])
def test_nan_on_any_one_rank_is_refused_by_all(
    bad: int, path: str, strategy: str, world_size: int, ended: Outcomes
) -> None:
    attempts = run_ranks(world_size, bring_nan, strategy, bad, path, debug="OFF")
    _check_refused(attempts, {"NonFiniteError"}, f"rank {bad} has a non-finite gradient for {path}")
    seconds = max(told.seconds for told, _ in attempts)
    ended("9 NaN on one rank", f"{strategy} {world_size}", "refused by all, then all go on", seconds)


def _reduces_nan(comm: sr.Communicator, bad: int) -> list[bool]:
    subject = make_subject("data parallel", comm, 1)
    subject.backward("m" if comm.rank == bad else "")
    assert isinstance(subject.session, sr.DataParallel)
    gradients = subject.session.reduce(local_weight=1).gradients
    return [bool(gradients[path].isnan().any()) for path in ("a", "m", "h")]


@pytest.mark.parametrize(("strategy", "world_size"), [("data parallel", 2), ("data parallel", 3)])
def test_data_parallel_hands_nan_out_to_all_alike(strategy: str, world_size: int, ended: Outcomes) -> None:
    """It judges nothing, so that all ranks see the same and its caller decides the same everywhere."""
    assert run_ranks(world_size, _reduces_nan, 1, debug="OFF") == [[False, True, False]] * world_size
    ended("9 NaN on one rank", f"{strategy} {world_size}", "handed out to all alike", 0.0)
