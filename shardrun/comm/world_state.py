"""What all communicators of one world share: its first failure, phase, collectives, timeout, observer.

[Note: letting go] gloo closes the connections of a destroyed group only when the last Python object that owns it is
gone: a handle, a pending work, the frame of a traceback that has one of them. A peer that waits for this rank alone
would then wait until this process ends (measured: worlds of 4 and more). So the first failure lets go of every group
and clears the frames below it. The buffers of failed collectives are what must stay, and are kept by name.
"""

from __future__ import annotations

import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from torch.distributed import DistError

from shardrun.comm.device import DeviceWatch
from shardrun.comm.group import Group
from shardrun.comm.history import Call, History
from shardrun.comm.last_words import Findings, Kind, LastWords, Word, find
from shardrun.comm.process_group import close_process_groups, set_group_timeout
from shardrun.errors import CommunicatorError, UsageError

Observer = Callable[[str, int], None]

_PATIENCE_S: Mapping[Kind, float] = {"timeout": 1.0, "closed": 0.5}  # how long other ranks' last words are awaited
_SOURCE = re.compile(r"^\[[^\]]*\.(?:cc|cpp|hpp|h):\d+\] ")  # where in gloo: of no use to a reader


@dataclass(frozen=True)
class Failure:
    """The first failure of a world, as far as this rank can know."""

    cause: str
    """One line: what failed where, and who is to blame if that is known."""
    kind: Kind
    """failed: by a fault on this rank; timeout: nobody came in time; closed: a connection closed or broke."""
    phase: str
    collective: int
    seconds: float
    """How long this rank had been in the collective; 0 outside of one."""
    missing: tuple[int, ...] = ()
    """Ranks (of the world) that should have come and said nothing."""
    culprit: int | None = None
    """The rank (of the world) that failed by a fault of its own, if one said so."""
    unheard: bool = False
    """Whether the others could not be heard, because the store is lost: of `missing` it is known, of the rest not."""

    def blamed(self, world_size: int) -> int | None:
        """The rank that failed by a fault of its own, or the only one that is missing; None if that is not known."""
        alone = self.missing[0] if len(self.missing) == 1 and (world_size == 2 or not self.unheard) else None
        return alone if self.culprit is None else self.culprit


class WorldState:
    """Held by a world's communicator and by every subgroup made from it, so that each speaks for all."""

    def __init__(
        self, group: Group, timeout_s: float, words: LastWords | None = None, device: DeviceWatch | None = None
    ) -> None:
        """`group` is the world's; `words` and `device` are what it has beside its process group, if anything."""
        self.world_size = group.size
        self.timeout_s = timeout_s
        """How long a collective may take."""
        self.observer: Observer | None = None
        self.phase = "start-up"
        self.collective = 0
        self.history = History()
        self.device = device
        self.failure: Failure | None = None
        self._rank = group.rank
        self._words = words
        self._kept_alive: list[object] = []
        self._groups = [group]
        self._pid = os.getpid()
        self.exchanging = False
        """Whether exchanges are under way, in which no others may begin."""

    @property
    def is_poisoned(self) -> bool:
        """Whether a failure has closed the world."""
        return self.failure is not None

    def add(self, group: Group) -> None:
        """Have `group` closed with the world."""
        self._groups.append(group)

    def set_timeout(self, seconds: float) -> None:
        """Let collectives that begin from now on take `seconds`; local."""
        self.timeout_s = seconds
        if self.failure is None:
            for group in self._groups:
                if group.talks:
                    set_group_timeout(group.handle, seconds)

    def enter(self, phase: str, *, cannot_fail: bool = False) -> None:
        """Mark the beginning of a phase."""
        self.phase = phase
        if self.observer is not None:
            with suppress(*([Exception] if cannot_fail else [])):
                self.observer(phase, self.collective)

    def poison(self, cause: str, keep_alive: object = None) -> None:
        """Close every connection of every group because of a fault on this rank; the first cause wins."""
        if self.failure is not None or self._is_forked:
            return
        if self._words is not None:
            self._words.leave(self._word("failed", None, cause))
        self._close(Failure(cause, "failed", self.phase, self.collective, 0.0), keep_alive)
        if self._words is not None:
            self._words.linger()

    def close(self, cause: str) -> None:
        """Leave in peace: close every connection without a word."""
        if self.failure is None and not self._is_forked:
            self._close(Failure(cause, "failed", self.phase, self.collective, 0.0), None)

    def require_open(self) -> None:
        """Raise if the world is closed, or another process's."""
        if self.failure is not None:
            raise CommunicatorError(f"communicator is closed since its first failure: {self.failure.cause}")
        if self._is_forked:
            raise UsageError(
                f"this communicator is that of process {self._pid}, and process {os.getpid()} was forked from it: its "
                "connections and shared pages are not to be used by two; call it in the process that opened it"
            )

    @property
    def _is_forked(self) -> bool:
        """Whether this is a forked child of the process that opened the world; what it closed would be its parent's."""
        return self.world_size > 1 and os.getpid() != self._pid

    @contextmanager
    def guard(
        self,
        what: str,
        group: Group,
        *buffers: object,
        fingerprint: str = "",
        ranks: Sequence[int] | None = None,
        goes_on: bool = False,
        ends: bool = True,
    ) -> Iterator[Call]:
        """Count, announce and write down a collective of `group`; whatever goes wrong in it closes the world.

        `ranks`: those of the world that wait for each other in it, if not all of the group do. `goes_on`: it is what is
        left of the last one. `ends` False: something will be left of it, and who waits for that ends the Call.
        """
        self.require_open()
        self.collective += not goes_on
        call = Call(self.collective, self.phase, what, group.ranks if ranks is None else ranks, buffers, fingerprint)
        if not goes_on:
            self.history.add(call)
        begun = False
        try:
            if self.observer is not None and not goes_on:
                self.observer(self.phase, self.collective)
                call.begin()
            begun = True
            yield call
            if ends:
                call.end()
        except BaseException as error:
            cause = self._failed(call, group, error, begun, (buffers, error))
            if isinstance(error, Exception):
                raise CommunicatorError(f"communicator closed at {cause}") from error
            raise

    def _failed(self, call: Call, group: Group, error: BaseException, begun: bool, keep_alive: object) -> str:
        """Close the world because of `error` in `call`, and find out whose fault it was; returns the cause."""
        seconds = call.seconds
        kind = _kind(error, seconds, self.timeout_s, begun)
        reason = _reason(error, kind, seconds)
        cause = f"{call.place} failed on {group.named(group.rank)}: {reason}"
        word = self._word(kind, call, f"{type(error).__name__}: {reason}" if kind == "failed" else reason)
        if self._words is not None:
            self._words.leave(word)
        self._close(Failure(cause, kind, call.phase, call.number, seconds), keep_alive)
        _let_go(error)
        found = self._findings(word, call.ranks)
        assert self.failure is not None
        cause = "; ".join(filter(None, (self.failure.cause, found.text)))
        unheard = self._words is not None and self._words.lost != ""
        self.failure = replace(self.failure, cause=cause, missing=found.missing, culprit=found.culprit, unheard=unheard)
        return cause

    def _findings(self, word: Word, ranks: Sequence[int]) -> Findings:
        """What the others say, see [Note: last words]."""
        if self._words is None:
            return Findings("")
        heard: dict[int, Word] = {}
        if word.kind != "failed":
            heard = self._words.listen(_PATIENCE_S[word.kind], _settles)
        silent = [rank for rank in ranks if rank not in heard and rank != self._rank]
        found = find(word, heard, silent, self._words.loss)
        self._words.linger()
        return found

    def _close(self, failure: Failure, keep_alive: object) -> None:
        self.failure = failure
        # gloo cannot cancel: a buffer of a failed collective stays in use and must never be freed or reused.
        self._kept_alive.append(keep_alive)
        if self.world_size == 1:
            return
        for group in self._groups:
            group.release()
        if problem := close_process_groups(self.device, dump=failure.kind != "failed"):
            self.failure = replace(failure, cause=f"{failure.cause}; {problem}")

    def _word(self, kind: Kind, call: Call | None, text: str) -> Word:
        what, seconds = ("no collective", 0.0) if call is None else (call.what, call.seconds)
        return Word(kind, self.collective, what, self.phase, seconds, text, time.time())


def _settles(heard: Mapping[int, Word]) -> bool:
    """Whether a word says whose fault it was."""
    return any(word.kind == "failed" for word in heard.values())


def _kind(error: BaseException, seconds: float, timeout_s: float, begun: bool) -> Kind:
    """torch has no class of its own for a collective that timed out or whose connection closed."""
    if isinstance(error, TimeoutError) and begun:
        return "timeout"
    if not begun or not _came_over_the_wire(error):
        return "failed"
    said = str(error).lower()
    return "timeout" if "timed out" in said or "timeout" in said or seconds >= 0.95 * timeout_s else "closed"


def _came_over_the_wire(error: BaseException) -> bool:
    """torch has plain RuntimeErrors for what happens between ranks. Its allocator has them for a lack of memory here;
    other faults of this rank, those of its device among them, have classes of their own."""
    plain = type(error) is RuntimeError and "can't allocate memory" not in str(error)
    return plain or isinstance(error, DistError)


def _reason(error: BaseException, kind: Kind, seconds: float) -> str:
    said = (str(error) or type(error).__name__).splitlines()[0]
    if kind == "timeout":
        return f"timed out after {seconds:.1f} s"
    if kind == "closed":
        return _SOURCE.sub("", said).partition(". This is typically caused by")[0]
    return said


def _let_go(error: BaseException) -> None:
    """Clear the frames that a failed collective has left, see [Note: letting go]; those still running stay."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
