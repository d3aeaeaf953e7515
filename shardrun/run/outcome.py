"""How a launched run ended: which rank is the cause, and the exit code."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardrun.errors import Interrupted, StoppedAfterSave
from shardrun.run.failure import Failure
from shardrun.run.status import Status

_HINTS = {
    signal.SIGKILL: "possibly out of memory",
    signal.SIGABRT: "it aborted itself, often after a failed collective",
}


UNKNOWN = "nobody can tell of it"
"""What is said of a host that is cut off by the loss of another one."""


@dataclass(frozen=True)
class RankEnd:
    """The end of one worker: `code` as in subprocess (negative: a signal). `ended_by_us`: the launcher killed it.

    `host` is named where there are several. `lost` says what became of that host if nothing is known of its ranks.
    """

    rank: int
    code: int
    status: Status
    failure: Failure | None
    ended_by_us: bool
    time: float
    host: str = ""
    lost: str = ""

    @property
    def done(self) -> bool:
        """Whether all its work was done. A crash or a hang while the finished process is torn down loses nothing."""
        return self.status.done and (self.code == self.status.code or self.code < 0)

    @property
    def follows(self) -> bool:
        """Whether it failed because a peer did."""
        return not self.done and (self.ended_by_us if self.failure is None else self.failure.follow_up)

    @property
    def when(self) -> float:
        """When it failed."""
        return self.time if self.failure is None else self.failure.time


@dataclass(frozen=True)
class Outcome:
    """`reason` is one line; `culprit` is None if nothing failed, or if no rank can be named."""

    exit_code: int
    reason: str
    culprit: RankEnd | None
    ends: tuple[RankEnd, ...]


def cut_short(ends: tuple[RankEnd, ...] = ()) -> Outcome:
    """The outcome of a second Ctrl-C."""
    return Outcome(Interrupted.exit_code, "interrupted, nothing saved", None, ends)


def lost_end(rank: int, host: str, how: str) -> RankEnd:
    """The end of a rank whose host is gone."""
    return RankEnd(rank, 0, Status(phase="unknown"), None, ended_by_us=False, time=time.time(), host=host, lost=how)


def end_from_json(document: Mapping[str, Any]) -> RankEnd:
    """The inverse of dataclasses.asdict, for an end that another launcher tells of."""
    failure = document["failure"]
    if failure is not None:
        failure = Failure(**{**failure, "frames": tuple(failure["frames"])})
    return RankEnd(**{**document, "status": Status(**document["status"]), "failure": failure})


def judge(ends: Sequence[RankEnd], total_steps: int | None, *, stopping: bool, interrupted: bool) -> Outcome:
    """The outcome of a run whose workers came to these `ends`.

    `stopping`: they were asked to save and leave; `interrupted`: they were killed on request.
    """
    ends = tuple(sorted(ends, key=lambda end: end.rank))
    if all(end.done for end in ends):
        codes = {end.status.code for end in ends}
        if codes == {0}:
            return Outcome(0, "done", None, ends)
        if codes == {StoppedAfterSave.exit_code}:
            return Outcome(StoppedAfterSave.exit_code, "stopped after saving", None, ends)
        said = ", ".join(f"rank {end.rank} with {end.status.code}" for end in ends)
        return Outcome(1, f"the ranks left with different codes: {said}", None, ends)
    if interrupted:
        return cut_short(ends)
    culprit = _culprit(ends)
    if stopping and culprit.code == -signal.SIGTERM:
        return Outcome(Interrupted.exit_code, "interrupted before it could save", None, ends)
    code = culprit.failure.exit_code if culprit.failure is not None else 1
    return Outcome(code, _reason(culprit, ends, total_steps), culprit, ends)


def _culprit(ends: Sequence[RankEnd]) -> RankEnd:
    failed = sorted((end for end in ends if not end.done), key=lambda end: end.when)
    by_itself = [end for end in failed if not end.follows and end.lost != UNKNOWN]
    if by_itself:
        return by_itself[0]
    # Every error is a failed collective: the cause is a rank that did not come to it, hence has no error to tell.
    missing = [end for end in failed if end.failure is None]
    if missing:
        return min(missing, key=lambda end: (end.status.collective, end.rank))
    return failed[0]


def _reason(culprit: RankEnd, ends: Sequence[RankEnd], total_steps: int | None) -> str:
    who, status, failure = _named(culprit), culprit.status, culprit.failure
    if culprit.lost:
        return _gone(culprit, ends)
    place = f"at step {status.step}, phase {status.phase}"
    if failure is not None and failure.code is not None:
        text = f": {failure.message}" if failure.message not in ("", "None", str(failure.code)) else ""
        return f"{who} left {_of(status, total_steps)} with code {failure.code}{text}"
    if failure is not None:
        return f"{who} failed {place}"
    if culprit.ended_by_us:
        return _missing(culprit, ends)
    if culprit.code < 0:
        number = -culprit.code
        hint = _HINTS.get(signal.Signals(number), signal.Signals(number).name)
        return f"{who} killed by signal {number} ({hint}) {place}"
    return f"{who} left {_of(status, total_steps)} with code {culprit.code}"


def _missing(culprit: RankEnd, ends: Sequence[RankEnd]) -> str:
    first = min((end for end in ends if end.failure is not None), key=lambda end: end.when)
    assert first.failure is not None
    status = culprit.status
    return (
        f"{_named(culprit)} is missing from collective {first.failure.collective} "
        f"({first.failure.phase} of step {first.failure.step}): it was at step {status.step}, phase {status.phase}, "
        f"for {max(0.0, first.when - status.since):.0f} s when rank {first.rank} gave up"
    )


def _gone(culprit: RankEnd, ends: Sequence[RankEnd]) -> str:
    """The hosts that are lost, and what the first of the others waited for when it gave up."""
    ranks: dict[str, list[int]] = {}
    for end in ends:
        if end.lost not in ("", UNKNOWN):
            ranks.setdefault(end.host, []).append(end.rank)
    hosts = [f"{host} with rank{'s' * (len(own) > 1)} {', '.join(map(str, own))}" for host, own in ranks.items()]
    text = f"{' and '.join(hosts)} {'is' if len(hosts) == 1 else 'are'} gone: {culprit.lost}"
    waiting = sorted((end for end in ends if not end.lost and not end.done), key=lambda end: end.when)
    if not waiting:
        return text
    told = next((end for end in waiting if end.failure is not None), None)
    if told is None or told.failure is None:
        place = waiting[0].status
        return f"{text}; rank {waiting[0].rank} was at step {place.step}, phase {place.phase}"
    cause = told.failure
    return f"{text}; rank {told.rank} waited in collective {cause.collective} ({cause.phase} of step {cause.step})"


def _named(end: RankEnd) -> str:
    return f"rank {end.rank} on {end.host}" if end.host else f"rank {end.rank}"


def _of(status: Status, total_steps: int | None) -> str:
    return f"at step {status.step}" + (f" of {total_steps}" if total_steps is not None else "")
