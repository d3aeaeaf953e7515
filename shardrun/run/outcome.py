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
    signal.SIGABRT: "SIGABRT: it aborted itself, often after a failed collective; its log has what it said",
    signal.SIGBUS: "SIGBUS: often a full /dev/shm, which loader workers use",
    signal.SIGSEGV: "SIGSEGV: a crash in compiled code; its log has what it said",
}
_LESS_MEMORY = "a smaller train.micro_batch_size or train.activation_checkpointing needs less"


UNKNOWN = "nobody can tell of it"
"""What is said of a host that is cut off by the loss of another one."""


@dataclass(frozen=True)
class RankEnd:
    """The end of one worker: `code` as in subprocess (negative: a signal). `ended_by_us`: the launcher killed it.

    `host` is named where there are several. `lost` says what became of that host if nothing is known of its ranks.
    `by_kernel`: the kernel has killed for want of memory at that time.
    """

    rank: int
    code: int
    status: Status
    failure: Failure | None
    ended_by_us: bool
    time: float
    host: str = ""
    lost: str = ""
    by_kernel: bool = False

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
    failure = None if document["failure"] is None else Failure.from_json(document["failure"])
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
    if culprit.follows and culprit.failure is not None and (absent := _absent(culprit, ends)):
        return Outcome(code, _absent_reason(culprit.failure, absent), _unseen(absent[0], culprit), ends)
    return Outcome(code, _reason(culprit, ends, total_steps), culprit, ends)


def _culprit(ends: Sequence[RankEnd]) -> RankEnd:
    failed = sorted((end for end in ends if not end.done), key=lambda end: end.when)
    by_itself = [end for end in failed if not end.follows and end.lost != UNKNOWN]
    if by_itself:
        return by_itself[0]
    # Every error is a failed collective: the cause is a rank that did not come to it, hence has no error to tell, or
    # one that came so late that the others had given up.
    late = {rank for end in failed for rank in _missed(end)}
    missing = [end for end in failed if end.failure is None] or [end for end in failed if end.rank in late]
    if missing:
        return min(missing, key=lambda end: (end.status.collective, end.rank))
    return failed[0]


def _missed(end: RankEnd) -> Sequence[int]:
    """The ranks for which this one waited."""
    return () if end.failure is None or end.failure.seen is None else end.failure.seen.missing


def _absent(end: RankEnd, ends: Sequence[RankEnd]) -> list[int]:
    """The ranks for which this one waited, and of which nothing else is known: of torchrun each rank ends alone."""
    return [rank for rank in _missed(end) if all(rank != other.rank for other in ends)]


def _absent_reason(found: Failure, absent: Sequence[int]) -> str:
    assert found.seen is not None
    one = len(absent) == 1
    who = f"rank {absent[0]} is" if one else f"ranks {', '.join(map(str, absent))} are"
    when = f"when rank {found.rank} gave up after {found.seen.seconds:.0f} s"
    if found.seen.kind == "closed":
        when = f"when {'its connection' if one else 'their connections'} to rank {found.rank} ended"
    place = f"collective {found.seen.collective} ({found.phase} of step {found.step})"
    return f"{who} missing from {place}: no word from {'it' if one else 'them'} {when}"


def tells(end: RankEnd) -> bool:
    """Whether a failed rank that ends alone says how the run ended: the cause does, or if it cannot the first left."""
    if not end.follows:
        return end.failure is None or not end.failure.agreed or end.rank == 0
    missing = _missed(end)
    assert end.failure is not None
    at_fault = end.failure.seen is not None and end.failure.seen.culprit is not None
    return not at_fault and all(rank in missing for rank in range(end.rank))


def _unseen(rank: int, seen_by: RankEnd) -> RankEnd:
    """A rank of which only others can tell: it was about where they were."""
    place = Status(seen_by.status.step, seen_by.status.phase, seen_by.status.collective)
    return RankEnd(rank, 0, place, None, ended_by_us=False, time=seen_by.time, host=seen_by.host)


def _reason(culprit: RankEnd, ends: Sequence[RankEnd], total_steps: int | None) -> str:
    who, status, failure = _named(culprit), culprit.status, culprit.failure
    if culprit.lost:
        return _gone(culprit, ends)
    place = f"at step {status.step}, phase {status.phase}"
    if failure is not None and failure.code is not None:
        text = f": {failure.message}" if failure.message not in ("", "None", str(failure.code)) else ""
        return f"{who} left {_of(status, total_steps)} with code {failure.code}{text}"
    if culprit.follows and (failure is None or any(culprit.rank in _missed(end) for end in ends)):
        return _missing(culprit, ends)
    if failure is not None and failure.agreed:
        return f"all ranks stopped {place}"
    if failure is not None:
        return f"{who} ran out of memory {place}; {_LESS_MEMORY}" if failure.out_of_memory else f"{who} failed {place}"
    if culprit.code < 0:
        number = -culprit.code
        hint = _HINTS.get(signal.Signals(number), signal.Signals(number).name)
        if culprit.by_kernel:
            hint = "out of memory: the kernel has killed for want of it"
        return f"{who} killed by signal {number} ({hint}) {place}"
    return f"{who} left {_of(status, total_steps)} with code {culprit.code}"


def _missing(culprit: RankEnd, ends: Sequence[RankEnd]) -> str:
    waited = [end for end in ends if end.failure is not None and end is not culprit]
    first = min(waited, key=lambda end: end.when)
    assert first.failure is not None
    status = culprit.status
    told = (
        f"{_named(culprit)} is missing from collective {first.failure.collective} "
        f"({first.failure.phase} of step {first.failure.step}): it "
    )
    if culprit.failure is not None:
        return f"{told}came when rank {first.rank} had given up"
    return (
        f"{told}was at step {status.step}, phase {status.phase}, "
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
