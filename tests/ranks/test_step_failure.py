"""A rank dies, raises, stops or is interrupted in each phase of a step; what the others hold must not have changed.

The fault strikes inside a real step of a real process: the communicator's observer is called at every phase and every
collective, and the victim's observer is the fault.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import shardrun as sr
from shardrun.errors import ShardrunError, StepFailed
from tests.support.models import MixedNet, loss_sum, seeded, token_batch
from tests.support.rank_process import mark
from tests.support.ranks import RunningRanks, start_ranks
from tests.support.sessions import make_zero2, photograph

_VICTIM = 1
_FAILING_STEP = 2  # two steps succeed before, so that there is state to lose

# phase, and which call of the observer in that phase: 0 is the phase's beginning, 1 its first collective, ...
_PLACES = [
    ("collect", 0),
    ("agree", 0),
    ("agree", 1),
    ("reduce", 0),
    ("reduce", 1),
    ("reduce", 3),
    ("normalise", 0),
    ("decide", 0),
    ("decide", 1),
    ("propose", 0),
    ("gather", 0),
    ("gather", 1),
    ("gather", 3),
    ("vote", 0),
    ("vote", 1),
]
_AT_THREE = [("agree", 1), ("reduce", 2), ("decide", 1), ("gather", 2), ("gather", 3), ("vote", 1)]
_KEEP_GRADIENTS = {"collect", "agree", "reduce", "normalise", "decide", "propose"}


@dataclass
class Fault:
    """Strike when the observer is called for the `nth` time in `phase`."""

    phase: str
    nth: int
    strike: Callable[[], None]
    calls: int = 0

    def __call__(self, phase: str, collective: int) -> None:
        """The communicator's observer."""
        if phase != self.phase:
            return
        if self.calls == self.nth:
            self.strike()
        self.calls += 1


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise ZeroDivisionError("a fault in user code")


def _stop() -> None:
    mark("stopping")
    os.kill(os.getpid(), signal.SIGSTOP)


def _dawdle() -> None:
    time.sleep(1.0)


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


_STRIKES = {"kill": _kill, "raise": _raise, "stop": _stop, "dawdle": _dawdle, "interrupt": _interrupt}


@dataclass(frozen=True)
class Survivor:
    """What a rank reports after the step that failed (or not)."""

    error: str
    changed: list[str]
    gradients_kept: bool | None
    in_doubt: bool | None
    phase: str | None
    seconds: float
    poisoned: bool
    later: tuple[str, float]


def _step_with_fault(comm: sr.Communicator, phase: str, nth: int, kind: str, stay_s: float = 0.0) -> Survivor:
    model = seeded(4, MixedNet)
    zero2 = make_zero2(comm, model, bucket_bytes=4096, lr=0.01)
    for step in range(_FAILING_STEP):
        torch.autograd.backward(loss_sum(model, token_batch(10 * step + comm.rank, 5)))
        zero2.step(local_weight=5, max_grad_norm=0.5)
    torch.autograd.backward(loss_sum(model, token_batch(99 + comm.rank, 5)))
    before = photograph(zero2)
    if comm.rank == _VICTIM:
        comm.observer = Fault(phase, nth, _STRIKES[kind])
    started = time.monotonic()
    caught: BaseException | None = None
    try:
        zero2.step(local_weight=5, max_grad_norm=0.5)
    except (StepFailed, KeyboardInterrupt) as error:
        caught = error
    seconds = time.monotonic() - started
    comm.observer = None
    if comm.rank == _VICTIM:
        time.sleep(stay_s)
    return _report(comm, zero2, caught, before.differences, seconds)


def _report(
    comm: sr.Communicator,
    zero2: sr.SelectedZero2,
    caught: BaseException | None,
    differences: Callable[..., list[str]],
    seconds: float,
) -> Survivor:
    failed = caught if isinstance(caught, StepFailed) else None
    # A KeyboardInterrupt carries no promise about gradients, and after a success they are gone.
    kept = failed.gradients_kept if failed is not None else False
    changed = differences(photograph(zero2), gradients=kept)
    started = time.monotonic()
    try:
        zero2.step(local_weight=5, missing="zero")
        later = "no error"
    except ShardrunError as error:
        later = f"{type(error).__name__}: {error}"
    return Survivor(
        error=f"{type(caught).__name__}: {caught}",
        changed=changed,
        gradients_kept=failed.gradients_kept if failed else None,
        in_doubt=failed.in_doubt if failed else None,
        phase=failed.phase if failed else None,
        seconds=seconds,
        poisoned=comm.is_poisoned,
        later=(later, time.monotonic() - started),
    )


def _others(ranks: RunningRanks) -> list[int]:
    return [rank for rank in range(ranks.world_size) if rank != _VICTIM]


def _check_unchanged(report: Survivor, phase: str) -> None:
    assert report.error.startswith("StepFailed: step 3 failed in phase "), report.error
    assert report.changed == []
    assert report.poisoned
    assert report.later[0].startswith("CommunicatorError: communicator is closed since its first failure")
    assert report.later[1] < 0.5
    assert report.gradients_kept == (report.phase in _KEEP_GRADIENTS)
    if phase in ("collect", "agree", "reduce"):
        assert report.gradients_kept, "the failure fell in phases 1 to 6 for everybody"
    assert report.in_doubt == (report.phase == "vote")


@pytest.mark.parametrize(
    ("phase", "nth", "world_size"), [(*place, 2) for place in _PLACES] + [(*place, 3) for place in _AT_THREE]
)
def test_a_killed_rank_leaves_the_others_as_before_the_step(phase: str, nth: int, world_size: int) -> None:
    debug = "DETAIL" if nth == 3 else "OFF"  # how torch fails differs with its own checks on
    with start_ranks(world_size, _step_with_fault, phase, nth, "kill", comm_timeout_s=20, debug=debug) as ranks:
        outcomes = ranks.collect(timeout_s=30)
    assert outcomes[_VICTIM].killed_by == signal.SIGKILL
    for rank in _others(ranks):
        assert outcomes[rank].ok, outcomes[rank].error
        _check_unchanged(outcomes[rank].value, phase)
        assert outcomes[rank].value.seconds < 10, "found long before the timeout"


@pytest.mark.parametrize(
    ("phase", "nth", "world_size"), [(*place, 2) for place in _PLACES if place[1] == 0] + [("gather", 2, 3)]
)
def test_an_exception_on_one_rank_frees_the_others_within_two_seconds(phase: str, nth: int, world_size: int) -> None:
    with start_ranks(world_size, _step_with_fault, phase, nth, "raise", comm_timeout_s=20, debug="OFF") as ranks:
        outcomes = ranks.collect(timeout_s=30)
    for outcome in outcomes:
        assert outcome.ok, outcome.error
        _check_unchanged(outcome.value, phase)
        assert outcome.value.seconds < 5, "2 s are promised on an idle machine; the timeout is 20 s"
    assert "a fault in user code" in outcomes[_VICTIM].value.error


@pytest.mark.parametrize("phase", ["agree", "reduce", "vote"])
def test_a_failed_rank_that_stays_alive_does_not_hold_the_others(phase: str) -> None:
    """Its process goes on, so that only the closing of its connections can free them before the timeout."""
    with start_ranks(3, _step_with_fault, phase, 0, "raise", 30.0, comm_timeout_s=20, debug="OFF") as ranks:
        outcomes = ranks.collect(timeout_s=15, ranks=_others(ranks))
        assert ranks.missing == [_VICTIM]
    for outcome in outcomes:
        assert outcome.ok, outcome.error
        _check_unchanged(outcome.value, phase)
        assert outcome.value.seconds < 5


def test_a_rank_killed_after_its_vote_does_not_hold_back_the_others() -> None:
    """All votes are in: the survivors commit. Whether they learn of the death at once or at the next call is theirs."""
    with start_ranks(3, _step_with_fault, "commit", 0, "kill", comm_timeout_s=20, debug="OFF") as ranks:
        outcomes = ranks.collect(timeout_s=30)
    for rank in _others(ranks):
        report: Survivor = outcomes[rank].value
        if report.error.startswith("None"):
            assert "parameter up.weight" in report.changed
            assert "step count 2 -> 3" in report.changed
        else:  # the death was seen inside the vote: whole again, and said so
            assert report.changed == []
            assert report.in_doubt


def test_a_stopped_rank_is_left_behind_in_time_and_fenced_out_when_it_wakes() -> None:
    with start_ranks(3, _step_with_fault, "reduce", 1, "stop", comm_timeout_s=3, debug="OFF") as ranks:
        ranks.wait_for_mark(_VICTIM, "stopping")
        survivors = ranks.collect(timeout_s=20, ranks=_others(ranks))
        ranks.send_signal(_VICTIM, signal.SIGCONT)
        (sleeper,) = ranks.collect(timeout_s=20, ranks=[_VICTIM])
    for outcome in survivors:
        assert outcome.ok, outcome.error
        _check_unchanged(outcome.value, "reduce")
        assert 2 < outcome.value.seconds < 8
    assert sleeper.ok, sleeper.error
    _check_unchanged(sleeper.value, "reduce")


@pytest.mark.parametrize("phase", ["agree", "gather"])
def test_a_slow_rank_below_the_timeout_changes_nothing(phase: str) -> None:
    with start_ranks(2, _step_with_fault, phase, 1, "dawdle", comm_timeout_s=20) as ranks:
        outcomes = ranks.collect(timeout_s=30)
    for outcome in outcomes:
        assert outcome.ok, outcome.error
        assert outcome.value.error.startswith("None"), outcome.value.error
        assert not outcome.value.poisoned


@pytest.mark.parametrize("phase", ["reduce", "gather"])
def test_an_interrupted_rank_raises_keyboard_interrupt_and_frees_the_others(phase: str) -> None:
    with start_ranks(2, _step_with_fault, phase, 0, "interrupt", comm_timeout_s=20, debug="OFF") as ranks:
        outcomes = ranks.collect(timeout_s=30)
    assert outcomes[0].ok, outcomes[0].error
    _check_unchanged(outcomes[0].value, phase)
    assert outcomes[0].value.seconds < 5
    victim: Survivor = outcomes[_VICTIM].value
    assert victim.error.startswith("KeyboardInterrupt")
    assert victim.changed == []
    assert victim.poisoned


def test_an_interrupt_after_the_vote_waits_for_the_commit() -> None:
    """Every rank has voted yes, so every living rank commits; the interrupt is raised when the state is whole."""
    with start_ranks(2, _step_with_fault, "commit", 0, "interrupt", comm_timeout_s=20, debug="OFF") as ranks:
        outcomes = ranks.collect(timeout_s=30)
    for outcome in outcomes:
        assert outcome.ok, outcome.error
        assert "step count 2 -> 3" in outcome.value.changed
        assert "parameter up.weight" in outcome.value.changed
    assert outcomes[_VICTIM].value.error.startswith("KeyboardInterrupt")


def _fail_alone(comm: sr.Communicator) -> tuple[list[str], str, Any]:
    model = seeded(4, MixedNet)
    zero2 = make_zero2(comm, model, lr=0.01)
    torch.autograd.backward(loss_sum(model, token_batch(1, 5)))
    before = photograph(zero2)
    comm.observer = Fault("decide", 0, _raise)
    with pytest.raises(StepFailed) as caught:
        zero2.step(local_weight=5, max_grad_norm=0.5)
    comm.observer = None
    changed = before.differences(photograph(zero2))
    return changed, str(caught.value), zero2.step(local_weight=5, max_grad_norm=0.5).global_weight


def test_a_world_of_one_can_retry_after_a_fault() -> None:
    changed, message, weight = _fail_alone(sr.Communicator.single())
    assert changed == []
    assert "a fault in user code" in message
    assert weight == 5
