"""The last collectives of this rank: what it was doing when something went wrong, and how long things took.

Writing down a collective costs a few microseconds (an object and the readings of two clocks), so it is always on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

SIZE = 64
"""How many collectives are remembered."""


class Call:
    """One collective: what was called, with which fingerprint and how many elements, from when to when."""

    __slots__ = ("_began_ns", "fingerprint", "number", "phase", "ranks", "sizes", "started_s", "took_ns", "what")

    def __init__(
        self,
        number: int,
        phase: str,
        what: str,
        ranks: Sequence[int],
        buffers: Sequence[object] = (),
        fingerprint: str = "",
    ) -> None:
        self.number = number
        self.phase = phase
        self.what = what
        self.ranks = ranks
        self.fingerprint = fingerprint
        """The text whose hash the ranks compare, where this collective compares one."""
        self.sizes = [*_sizes(buffers)]  # numbers only: a buffer that is remembered here could not be freed
        self.took_ns: int | None = None
        """None while it is unfinished."""
        self.begin()

    def begin(self) -> None:
        """Its time counts from here, if something came between its announcement and this."""
        self.started_s = time.time()
        self._began_ns = time.perf_counter_ns()

    @property
    def seconds(self) -> float:
        """How long it took, or has taken so far."""
        return (time.perf_counter_ns() - self._began_ns if self.took_ns is None else self.took_ns) / 1e9

    @property
    def place(self) -> str:
        """As messages name it."""
        return f"collective {self.number} ({self.what}, phase {self.phase})"

    def end(self) -> None:
        """It is done."""
        self.took_ns = time.perf_counter_ns() - self._began_ns

    def plain(self) -> dict[str, Any]:
        """As data that JSON can hold."""
        return {
            "collective": self.number,
            "phase": self.phase,
            "what": self.what,
            "fingerprint": self.fingerprint,
            "ranks": list(self.ranks),
            "sizes": [f"{numel} {str(dtype).removeprefix('torch.')}" for numel, dtype in self.sizes],
            "started": self.started_s,
            "ended": "unfinished" if self.took_ns is None else self.started_s + self.took_ns / 1e9,
            "microseconds": None if self.took_ns is None else self.took_ns // 1000,
        }


def _sizes(buffers: Sequence[object]) -> Iterator[tuple[int, object]]:
    for buffer in buffers:
        if isinstance(buffer, Tensor):
            yield buffer.numel(), buffer.dtype
        elif isinstance(buffer, list):
            yield sum(piece.numel() for piece in buffer), buffer[0].dtype


class History:
    """A ring of the last 64 calls."""

    def __init__(self) -> None:
        self._ring: list[Call | None] = [None] * SIZE

    def add(self, call: Call) -> None:
        """Remember `call` and forget the one of 64 numbers ago; numbers are 1, 2, 3, ... of this process."""
        self._ring[call.number % SIZE] = call

    def calls(self) -> list[Call]:
        """Those remembered, oldest first."""
        return sorted((call for call in self._ring if call is not None), key=lambda call: call.number)

    def text(self) -> str:
        """A table for a log, one line per collective, oldest first; nothing if there was none."""
        rows = [_row(call) for call in self.calls()]
        return "\n".join([_HEAD, *rows]) if rows else ""


_HEAD = f"{'collective':>10}  {'started':<12}  {'microseconds':>12}  {'phase':<11}  {'ranks':<9}  what"


def _row(call: Call) -> str:
    told = call.plain()
    clock = f"{time.strftime('%H:%M:%S', time.localtime(call.started_s))}.{int(call.started_s % 1 * 1000):03d}"
    took = "unfinished" if call.took_ns is None else told["microseconds"]
    what = call.what + (f" [{', '.join(told['sizes'])}]" if call.sizes else "")
    if call.fingerprint:
        what += f": {call.fingerprint}"
    return f"{call.number:>10}  {clock}  {took:>12}  {call.phase:<11}  {_ranks(call.ranks):<9}  {what}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))
