"""What a rank leaves for the others when it fails, and what they make of it: who failed first, who is missing.

[Note: last words] A rank that only sees its own side of a failed collective cannot say whose fault it was. So a rank
that fails writes one line into the rendezvous store, before it closes its connections, and reads those of the others.
A rank without a word is dead, stopped or somewhere else: it is the one that is missing. Nothing is written or read
while all goes well. The store may be what is gone, so nobody waits for it longer than a moment: torch's client of it
knows no timeout where its server is stopped, and fills the screen with C++ frames where it is dead. Hence the thread,
and the knock at the door before each call.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from shardrun.comm.group import listed

Kind = Literal["failed", "timeout", "closed"]

_ANSWER_S = 1.0  # how long a call to the store may take
_POLL_S = 0.01
_LINGER_S = 0.5  # how long the keeper of the store stays for others that still read

T = TypeVar("T")


@dataclass(frozen=True)
class Word:
    """How a rank failed: by a fault of its own, because nobody came in time, or because a connection closed."""

    kind: Kind
    collective: int
    what: str
    phase: str
    seconds: float
    """How long it had been in the collective."""
    text: str
    time: float
    """When it failed, in seconds of the epoch."""

    @property
    def began(self) -> float:
        """When it had come to the collective."""
        return self.time - self.seconds

    @property
    def place(self) -> str:
        """As messages name the collective."""
        return f"collective {self.collective} ({self.what}, phase {self.phase})"


@dataclass(frozen=True)
class Findings:
    """What the words of all ranks say about one failure. Ranks are those of the world."""

    text: str
    missing: tuple[int, ...] = ()
    """Ranks of the group that left no word, or came when another had given up."""
    culprit: int | None = None
    """The rank that failed by a fault of its own, if one said so."""


class LastWords:
    """The place for words in the store of one world. `keeper`: the store lives in the process of rank 0."""

    def __init__(self, store: Store, rank: int, world_size: int, keeper: tuple[str, int] | None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._keeper = keeper
        self._lost = ""
        self._readers = [*self._others()]

    def leave(self, word: Word) -> None:
        """Write `word`; a store that cannot take it loses it."""
        text = json.dumps(asdict(word))
        self._ask(lambda: self._store.set(f"word/{self.rank}", text))

    def listen(self, patience_s: float, enough: Callable[[Mapping[int, Word]], bool]) -> dict[int, Word]:
        """The words of the other ranks: as soon as they are `enough` or all, at the latest after `patience_s`."""
        heard: dict[int, Word] = {}
        deadline = time.monotonic() + patience_s
        while not self._lost:
            for rank in self._others():
                if rank not in heard and self._ask(lambda rank=rank: self._store.check([f"word/{rank}"])):  # type: ignore[misc]
                    raw = self._ask(lambda rank=rank: self._store.get(f"word/{rank}"))  # type: ignore[misc]
                    heard |= {} if raw is None else {rank: Word(**json.loads(raw))}
            if len(heard) == self.world_size - 1 or enough(heard) or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        self._ask(lambda: self._store.set(f"heard/{self.rank}", "1"))
        self._readers = [*heard]  # who says nothing does not read either
        return heard

    def linger(self) -> None:
        """Let the others read, those that have left a word if this rank has listened: the store ends with rank 0."""
        if self.rank != 0 or self._keeper is None:
            return
        deadline = time.monotonic() + _LINGER_S
        keys = [f"heard/{rank}" for rank in self._readers]
        while (
            keys and not self._lost and time.monotonic() < deadline and not self._ask(lambda: self._store.check(keys))
        ):
            time.sleep(_POLL_S)

    @property
    def lost(self) -> str:
        """Why the store cannot be asked, empty as long as it answers."""
        return self._lost

    @property
    def loss(self) -> Findings | None:
        """What it means that the store cannot be asked; None as long as it answers."""
        if not self._lost:
            return None
        told = f"the store of the rendezvous {self._lost}"
        if self._keeper is None:  # a rank that is cut off from it has heard nobody, and nobody speaks for it
            return Findings(told, tuple(rank for rank in self._others() if rank not in self._readers))
        if self.rank == 0:
            return Findings(told)
        return Findings(f"rank 0, which keeps the store of the rendezvous, {self._lost}", (0,))

    def _others(self) -> Iterator[int]:
        return (rank for rank in range(self.world_size) if rank != self.rank)

    def _ask(self, call: Callable[[], T]) -> T | None:
        """What `call` to the store returns, or None once it cannot be asked."""
        if self._lost:
            return None
        if self._keeper is not None and self.rank != 0:
            try:
                socket.create_connection(self._keeper, _ANSWER_S).close()
            except OSError:
                self._lost = "is gone"
                return None
        answer: list[T] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError, OSError):
                answer.append(call())

        try:
            asking = threading.Thread(target=ask, name="last words", daemon=True)
            asking.start()
        except RuntimeError:  # the interpreter is ending
            self._lost = "is gone"
            return None
        asking.join(_ANSWER_S)
        if asking.is_alive():
            self._lost = "does not answer"
        elif not answer:
            self._lost = "is gone"
        return answer[0] if answer else None


def find(own: Word, heard: Mapping[int, Word], silent: Sequence[int], loss: Findings | None = None) -> Findings:
    """What the words say: `own` of this rank, those `heard`, and which ranks of the group are `silent`.

    `loss`: what the store itself tells by not answering.
    """
    if own.kind == "failed":
        return Findings("")
    failed = [rank for rank, word in heard.items() if word.kind == "failed"]
    if failed:
        first = min(failed, key=lambda rank: heard[rank].time)
        return Findings(_at_fault(first, heard[first]), (), first)
    if loss is not None:
        return loss
    gave_up = {rank: word for rank, word in heard.items() if word.kind == "timeout"}
    ends = [word.time for word in (own, *gave_up.values()) if word.kind == "timeout"]
    late = {rank: word.began - min(ends) for rank, word in heard.items() if ends and word.began >= min(ends)}
    told = [f"rank {rank} had given up after {word.seconds:.1f} s in {word.place}" for rank, word in gave_up.items()]
    told = [] if own.kind == "timeout" else told[:1]
    told += [f"rank {rank} is missing: it came {seconds:.1f} s later" for rank, seconds in late.items()]
    told += [_absent(silent)] if silent else []
    if not told and own.kind == "timeout":  # everybody came to some collective
        told = [f"rank {rank} was in {word.place}" for rank, word in sorted(heard.items())]
    return Findings("; ".join(told), tuple(sorted([*silent, *late])))


def _at_fault(rank: int, word: Word) -> str:
    if word.text.startswith(f"rank {rank} failed"):
        return word.text
    return f"rank {rank} failed first, in phase {word.phase}: {word.text}"


def _absent(ranks: Sequence[int]) -> str:
    who = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {listed(ranks)} are"
    return f"{who} missing: no word from {'it' if len(ranks) == 1 else 'them'}"
