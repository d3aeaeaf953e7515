"""A rank dies or raises inside a step of several sessions: no session of any survivor has changed, all are closed.

Dense weights live on three ranks, experts on 0 and 1, another one on rank 2 alone. The fault strikes rank 1 through the
communicator's observer, which is called at every phase and every collective of every group.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardrun as sr
from shardrun.errors import ShardrunError, StepFailed
from tests.support.models import Vectors, push
from tests.support.rank_process import Seat, open_communicator
from tests.support.ranks import run_ranks, start_ranks
from tests.support.sessions import Photograph, make_zero2, photograph, told

pytestmark = pytest.mark.sample(4)

_VICTIM = 1
_KEEP_GRADIENTS = {"collect", "agree", "reduce", "normalise", "decide", "propose"}

_FAULT = "a fault in user code"

# Phase, and which call of the observer in it on the victim: 0 is the phase's beginning. The others are its collectives
# in their order: dense weights, of which there are d buckets, before experts, between comparisons of the whole world.
_PLACES: dict[str, tuple[str, Callable[[int], int]]] = {
    "collect": ("collect", lambda d: 0),
    "agree": ("agree", lambda d: 0),
    "agree: sessions": ("agree", lambda d: 1),
    "agree: gradients of dense": ("agree", lambda d: 2),
    "agree: gradients of experts": ("agree", lambda d: 3),
    "agree: windows": ("agree", lambda d: 4),
    "reduce": ("reduce", lambda d: 0),
    "reduce: dense": ("reduce", lambda d: d),
    "reduce: experts": ("reduce", lambda d: d + 1),
    "normalise": ("normalise", lambda d: 0),
    "decide": ("decide", lambda d: 0),
    "decide: norm": ("decide", lambda d: 1),
    "propose": ("propose", lambda d: 0),
    "gather": ("gather", lambda d: 0),
    "gather: dense": ("gather", lambda d: d),
    "gather: experts": ("gather", lambda d: d + 1),
    "vote": ("vote", lambda d: 0),
    "vote: ballot": ("vote", lambda d: 1),
}
_ALONE = 2
"""The rank whose experts are its own alone: it has no collective with them."""
_BEGINNINGS = ["agree", "reduce", "propose", "gather", "vote"]


@dataclass
class _Fault:
    """Strike when the observer is called for the `nth` time in `phase`."""

    phase: str
    nth: int
    strike: Callable[[], None]
    calls: int = 0

    def __call__(self, phase: str, collective: int) -> None:
        """The communicator's observer."""
        if phase == self.phase:
            if self.calls == self.nth:
                self.strike()
            self.calls += 1


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise ZeroDivisionError(_FAULT)


def _model(rank: int) -> nn.Module:
    expert = (700,) if rank < _ALONE else (11, 30)
    return Vectors({"matrix": (6, 40), "vector": (300,), "expert": expert}, value=1.0)


class _Sessions:
    """Dense (on three ranks) and experts (on two and one) over `model`, as a new world of `comm` makes them."""

    def __init__(self, comm: sr.Communicator, model: nn.Module, strategy: str) -> None:
        self.comm, self.model = comm, model
        pair, alone = comm.subgroup([0, 1]), comm.subgroup([_ALONE])
        group = pair or alone
        assert group is not None
        self.group = group
        dense = sr.SelectedDataParallel(comm, model, sr.select_parameters(model, exclude=["expert"]))
        self.dense: sr.SelectedZero1 | sr.SelectedZero2 = (
            sr.SelectedZero1(dense, torch.optim.Muon, lr=0.02, name="dense")
            if strategy == "zero1"
            else sr.SelectedZero2(dense, torch.optim.AdamW, lr=0.02, name="dense")
        )
        self.experts = make_zero2(group, model, include=["expert"], name="experts", lr=0.05)
        self.both: list[Any] = [self.dense, self.experts]

    def push(self, step: int) -> None:
        """The gradients of one step on this rank."""
        generator = torch.Generator().manual_seed(10 * step + self.comm.rank)
        push(self.model, {path: torch.randn(p.shape, generator=generator) for path, p in self.model.named_parameters()})

    def step(self) -> None:
        sr.take_step(self.both, local_weight=2, max_grad_norm=0.5)

    def photographs(self) -> list[Photograph]:
        return [photograph(session) for session in self.both]


@dataclass(frozen=True)
class _Report:
    """What a rank that lived saw of a step that failed."""

    error: str
    phase: str | None
    gradients_kept: bool | None
    in_doubt: bool | None
    changed: list[list[str]]
    gone: bool
    poisoned: list[bool]
    later: set[tuple[str, str]]
    seconds: float


def _calls(held: _Sessions) -> list[Callable[[], object]]:
    alone = [partial(session.step, local_weight=2) for session in held.both]
    return [held.step, *alone, held.comm.vote, held.group.vote, partial(held.comm.subgroup, [0])]


def _refused(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except ShardrunError as error:
        return told(error)
    return "nothing", ""


def _fail(held: _Sessions, place: str, victim: int, strike: Callable[[], None]) -> _Report:
    """One step into which the fault falls; its gradients are pending."""
    comm = held.comm
    before = held.photographs()
    phase, nth = _PLACES[place]
    if comm.rank == victim:
        comm.observer = _Fault(phase, nth(len(held.dense.slices)), strike)
    began = time.monotonic()
    failed: StepFailed | None = None
    try:
        held.step()
    except StepFailed as error:
        failed = error
    seconds = time.monotonic() - began
    comm.observer = None
    kept = failed is None or failed.gradients_kept
    return _Report(
        error=str(failed),
        phase=failed.phase if failed else None,
        gradients_kept=failed.gradients_kept if failed else None,
        in_doubt=failed.in_doubt if failed else None,
        changed=[b.differences(a, gradients=kept) for b, a in zip(before, held.photographs(), strict=True)],
        gone=all(p.grad is None for p in held.model.parameters()),
        poisoned=[comm.is_poisoned, held.group.is_poisoned],
        later={_refused(call) for call in _calls(held)},
        seconds=seconds,
    )


def _check(report: _Report, place: str, *, in_experts: bool = False) -> None:
    """What is promised to every rank that lives, whichever group it is in."""
    phase = _PLACES[place][0]
    assert report.error.startswith(f"step 3 failed in phase {report.phase}: "), (place, report.error)
    assert report.changed == [[], []], place
    assert report.gradients_kept == (report.phase in _KEEP_GRADIENTS), (place, report.phase)
    assert report.gone == (not report.gradients_kept), (place, "dropped, or bit-identical")
    # After the decision nobody waits before gather: others may be there while one rank still proposes.
    assert report.gradients_kept or phase in ("propose", "gather", "vote"), (place, report.phase)
    assert report.in_doubt == (report.phase == "vote"), (place, report.phase)
    assert report.poisoned == [True, True]
    assert len(report.later) == 1, (place, "one cause for all communicators and sessions", report.later)
    ((kind, told_later),) = report.later
    assert kind == "CommunicatorError"
    assert told_later.startswith("communicator is closed since its first failure: "), told_later
    assert ("of the subgroup 0,1" in told_later) >= in_experts, (place, told_later)
    assert report.seconds < 10, "found long before the timeout"


def _open(seat: Seat, number: int, model: nn.Module, strategy: str) -> _Sessions:
    """A new world, the `number`-th of this process."""
    comm = open_communicator(replace(seat, init_file=f"{seat.init_file}-{number}"), timeout_s=20)
    return _Sessions(comm, model, strategy)


def _raise_everywhere(seat: Seat, strategy: str, tries: list[tuple[str, int]]) -> tuple[list[_Report], list[list[str]]]:
    """A step fails at each place in turn; a new world takes up the records and makes the very same step."""
    held = _open(seat, 0, _model(seat.rank), strategy)
    untried = _Sessions(held.comm, _model(seat.rank), strategy)
    for step in range(2 + len(tries)):
        untried.push(step)
        untried.step()
    for step in range(2):
        held.push(step)
        held.step()
    reports = []
    for number, (place, victim) in enumerate(tries, 1):
        held.push(1 + number)
        report = _fail(held, place, victim, _raise)
        reports.append(report)
        records = [session.to_record() for session in held.both]
        held = _open(seat, number, held.model, strategy)
        for session, record in zip(held.both, records, strict=True):
            session.load_record(record)
        if report.gone:
            held.push(1 + number)
        held.step()
    pairs = zip(held.photographs(), untried.photographs(), strict=True)
    return reports, [one.differences(other) for one, other in pairs]


@pytest.mark.parametrize("strategy", ["zero2", "zero1"])
def test_an_exception_anywhere_leaves_all_sessions_as_before_and_the_step_can_be_made_in_a_new_world(
    strategy: str,
) -> None:
    tries = [(place, _VICTIM) for place in _PLACES] + [(place, _ALONE) for place in _BEGINNINGS]
    for rank, (reports, differences) in enumerate(
        run_ranks(3, _raise_everywhere, strategy, tries, open_comm=False, debug="OFF")
    ):
        for number, ((place, victim), report) in enumerate(zip(tries, reports, strict=True)):
            error = report.error.replace(f"step {number + 3} ", "step 3 ", 1)
            _check(replace(report, error=error), place, in_experts=place.endswith("experts") and rank == victim)
            assert rank != victim or _FAULT in error
            assert rank != victim or report.phase == _PLACES[place][0]
        assert differences == [[], []]


def _fail_once(comm: sr.Communicator, strategy: str, place: str) -> _Report:
    held = _Sessions(comm, _model(comm.rank), strategy)
    for step in range(3):
        held.push(step)
        if step < 2:
            held.step()
    return _fail(held, place, _VICTIM, _kill)


_KILLS = [
    *(("zero2", place) for place in _PLACES if ":" in place or place == "propose"),
    *(("zero1", place) for place in ("reduce: dense", "gather: dense", "gather: experts", "vote: ballot")),
]


@pytest.mark.parametrize(("strategy", "place"), _KILLS)
def test_a_killed_rank_leaves_all_sessions_of_the_others_as_before(strategy: str, place: str) -> None:
    """Rank 0 shares the expert of the victim, rank 2 does not."""
    with start_ranks(3, _fail_once, strategy, place, comm_timeout_s=20, debug="OFF") as ranks:
        outcomes = ranks.collect(timeout_s=30)
    assert outcomes[_VICTIM].killed_by == signal.SIGKILL
    for rank in (0, _ALONE):
        assert outcomes[rank].ok, outcomes[rank].error
        _check(outcomes[rank].value, place)


class _Raises(torch.optim.SGD):
    """A user's own optimizer, which fails once it is told to."""

    fault = False

    def step(self, closure: Any = None) -> Any:
        if _Raises.fault:
            raise ZeroDivisionError("a fault in user code")
        return super().step(closure)


def _alone(comm: sr.Communicator) -> tuple[str, str, bool, list[float]]:
    """Dense weights on both ranks, an expert on each; rank 1's optimizer of its expert raises."""
    model = Vectors({"dense": (4,), "expert": (4,)})
    own = next(group for group in [comm.subgroup([rank]) for rank in range(comm.world_size)] if group is not None)
    raises = sr.Declared(_Raises, kind="matrix", name="own") if comm.rank == 1 else torch.optim.SGD
    parts = []
    for name, group in (("dense", comm), ("expert", own)):
        selection = sr.select_parameters(model, include=[name])
        session = sr.SelectedDataParallel(group, model, selection)
        parts.append(sr.SelectedZero1(session, torch.optim.SGD if group is comm else raises, lr=1.0, name=name))
    push(model, {"dense": torch.ones(4), "expert": torch.ones(4)})
    _Raises.fault = True
    try:
        sr.take_step(parts, local_weight=1)
    except StepFailed as error:
        return error.phase, str(error), error.in_doubt, [p.sum().item() for p in model.parameters()]
    return "none", "", False, [p.sum().item() for p in model.parameters()]


def test_an_optimizer_that_raises_in_a_group_of_one_does_so_before_anybody_has_voted() -> None:
    outcomes = run_ranks(2, _alone)
    assert [values for _, _, _, values in outcomes] == [[0.0, 0.0]] * 2
    assert [in_doubt for _, _, in_doubt, _ in outcomes] == [False, False]
    assert outcomes[1][0] == "propose"
    assert "ZeroDivisionError: a fault in user code" in outcomes[1][1]
