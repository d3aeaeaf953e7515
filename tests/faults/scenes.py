"""What every rank does in a test of one fault: two good steps, then one in which it happens; and what it tells then."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import shardrun as sr
from shardrun.comm.faults import plan
from shardrun.errors import CommunicatorError, ShardrunError, StepFailed
from tests.faults.subjects import Subject, digest_of, make_subject
from tests.support.sessions import Photograph

GOOD_STEPS = 2  # before the fault, so that there is state to lose
SEED = 11
KEEP_GRADIENTS = ("collect", "agree", "reduce", "normalise", "decide", "propose")

Act = Callable[[], object]


@dataclass(frozen=True)
class Told:
    """One rank's report."""

    steps: int
    whole: bool
    """Whether it holds, bit for bit, what a twin without faults held after as many steps."""
    changed: list[str]
    """What the step changed; gradients too where it says that they are kept."""
    kind: str = ""
    """Class of what the step raised; empty if nothing."""
    message: str = ""
    cause: str = ""
    """Class and message of the error that was raised first."""
    phase: str = ""
    gradients_kept: bool = False
    in_doubt: bool = False
    seconds: float = 0.0
    """How long the step took."""
    raised_at: float = 0.0
    """time.monotonic(), the same for all processes."""
    poisoned: bool = False
    missing: tuple[int, ...] = ()
    """Ranks that it says did not come."""
    culprit: int | None = None
    """The rank that its StepFailed names."""
    sockets: int = 0
    later: str = ""
    """What the next call raised."""
    later_s: float = 0.0


def suffer(comm: sr.Communicator, strategy: str, text: str, stay_s: float = 0.0, within_s: float | None = None) -> Told:
    """Two good steps, then one under the plan `text`. The rank it names stays for `stay_s` after its failure.

    `within_s`: the timeout of that step alone.
    """
    subject, twin = _prepare(comm, strategy)
    before = subject.look()
    plan(text, comm.world_size).install(comm)
    with comm.timeout(within_s or comm.timeout_s):
        told = _attempt(comm, subject, twin, before, subject.step, text.startswith("kill"))
    if f"rank {comm.rank} " in text:
        time.sleep(stay_s)
    return told


def suffer_act(comm: sr.Communicator, strategy: str, victim: int, phase: str, act: Act) -> Told:
    """The same with `act` on rank `victim` when `phase` begins. SIGTERM raises SystemExit."""
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored by what runs in the background
    subject, twin = _prepare(comm, strategy)
    before = subject.look()

    def strike(now: str, collective: int) -> None:
        if now == phase:
            comm.observer = None
            act()

    comm.observer = strike if comm.rank == victim else None
    return _attempt(comm, subject, twin, before, subject.step)


def ask_otherwise(
    comm: sr.Communicator, strategy: str, victim: int, act: Callable[[Subject], object]
) -> tuple[Told, Told]:
    """Rank `victim` does `act` in the place of the step, which all refuse; then all make the step."""
    subject, twin = _prepare(comm, strategy)
    before = subject.look()
    told = _attempt(comm, subject, twin, before, partial(act, subject) if comm.rank == victim else subject.step)
    return told, _attempt(comm, subject, twin, subject.look(), subject.step)


def fail_alone(comm: sr.Communicator, strategy: str, text: str) -> tuple[Told, Told]:
    """In a world of one: a step under the plan `text`, and then one without, with the gradients that are left."""
    subject, twin = _prepare(comm, strategy)
    before = subject.look()
    plan(text).install(comm)
    told = _attempt(comm, subject, twin, before, subject.step)
    if not told.gradients_kept:
        subject.backward()
    return told, _attempt(comm, subject, twin, subject.look(), subject.step)


def bring_nan(comm: sr.Communicator, strategy: str, bad: int, path: str) -> tuple[Told, Told]:
    """Rank `bad` has a NaN in the gradient of `path`, which all refuse; then all make the step without it."""
    subject, twin = _prepare(comm, strategy)
    subject.drop()
    subject.backward(path if comm.rank == bad else "")
    told = _attempt(comm, subject, twin, subject.look(), subject.step)
    subject.drop()
    subject.backward()
    return told, _attempt(comm, subject, twin, subject.look(), subject.step)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _prepare(comm: sr.Communicator, strategy: str) -> tuple[Subject, list[str]]:
    """A subject with a window's gradients pending after the good steps, and the digests of its twin by step."""
    twin, digests = make_subject(strategy, comm, SEED), []
    for _ in range(GOOD_STEPS + 2):
        twin.backward()
        digests.append(digest_of(twin.look()).state)
        twin.step()
    subject = make_subject(strategy, comm, SEED)
    for _ in range(GOOD_STEPS):
        subject.backward()
        subject.step()
    subject.backward()
    return subject, digests


def _attempt(
    comm: sr.Communicator, subject: Subject, twin: list[str], before: Photograph, call: Act, ends: bool = False
) -> Told:
    """`ends`: no call can succeed after this one, whether it has seen the failure or not."""
    started = time.monotonic()
    caught: BaseException | None = None
    try:
        call()
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        caught = error
    raised_at = time.monotonic()
    comm.observer = None
    failed = caught if isinstance(caught, StepFailed) else None
    if caught is not None and not isinstance(caught, Exception) and comm.phase == "idle":
        subject.finish()
    kept = failed.gradients_kept if failed is not None else isinstance(caught, ShardrunError)
    seen = subject.look()
    common: dict[str, Any] = {
        "steps": subject.steps,
        "whole": digest_of(seen).state == twin[subject.steps],
        "changed": before.differences(seen, gradients=kept),
        "seconds": raised_at - started,
        "raised_at": raised_at,
        "poisoned": comm.is_poisoned,
        "missing": comm.failure.missing if comm.failure is not None else (),
        "culprit": failed.culprit if failed is not None else None,
        "sockets": _sockets(),
    }
    common["later"], common["later_s"] = _later(subject) if comm.is_poisoned or ends else ("", 0.0)
    if caught is None:
        return Told(**common)
    return Told(
        **common,
        kind=type(caught).__name__,
        message=str(caught),
        cause=_first(caught),
        phase=failed.phase if failed is not None else "",
        gradients_kept=kept,
        in_doubt=failed is not None and failed.in_doubt,
    )


def _first(error: BaseException) -> str:
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return f"{type(error).__name__}: {error}"


def _later(subject: Subject) -> tuple[str, float]:
    """What five more calls raise, the same each time, and how long one takes. One that is to find out comes before."""
    said, times = set(), []
    deadline = time.monotonic() + 5
    while not subject.comm.is_poisoned and time.monotonic() < deadline:  # a rank that is to be killed may still answer
        with suppress(CommunicatorError):
            subject.comm.agree("save")
    for call in (subject.step, subject.step, lambda: subject.comm.agree("save"), subject.comm.vote, subject.step):
        started = time.monotonic()
        try:
            call()
            said.add("nothing")
        except CommunicatorError as error:
            said.add(str(error))
        times.append(time.monotonic() - started)
    return " AND ".join(sorted(said)), median(times)


def _sockets() -> int:
    """How many sockets this process has: none, nothing can be sent."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found += os.readlink(entry).startswith("socket:")
        except OSError:  # the one that lists the folder
            continue
    return found
