"""Signals between the ranks of one host: a few bytes that each rank writes and all others read, without a system call.

[Note: signals] gloo's own messages take a wake-up of its thread, which on a busy machine is milliseconds. A rank writes
a flag, then its count of signals, in a page that the others have mapped; who waits for it looks there. Stores are seen
in this order on x86 only, so elsewhere signals go over gloo. What gloo would notice is looked for while waiting: a
peer that has closed its communicator says so on its page, one that has ended is known by its process, one that does not
come by the clock.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import struct
import time
import weakref
from collections.abc import Callable, Sequence

_TURNS = 4  # others are at most 3 signals ahead of one who reads: an agreement in an exchange, both begun and ended
_PART = 16 << 10
"""Bytes that a turn has for a part of a text and, in front of it, the length of the whole."""
_TEXTS = 4096
BOARD_BYTES = _TEXTS + _TURNS * _PART
_COUNT, _CLOSED, _GAVE_UP, _FLAGS, _NUMBERS = 0, 1, 2, 64, 1024
_SUMMED = 2
"""The flag of a signal that comes with numbers or text."""
MOST_NUMBERS = 64
_SPINS = 300
_NAP_S = 0.00005
_LONGEST_NAP_S = 0.0005


def _gave_up(number: int) -> int:
    """What a page says of a signal on which its rank has given up; 0 says nothing."""
    return number & 127 | 128


def knows_order() -> bool:
    """Whether this machine lets others see stores in the order in which they were made."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "pidfd_open")


class Board:
    """The pages of a group's ranks. `pids`: by rank; `named`: how a message names a rank."""

    def __init__(
        self,
        own: mmap.mmap,
        others: Sequence[mmap.mmap | None],
        pids: Sequence[int],
        named: Callable[[int], str],
    ) -> None:
        """OSError where a process cannot be watched."""
        self._own = own
        self._others = {rank: page for rank, page in enumerate(others) if page is not None}
        self._size = len(others)
        self._named = named
        self._count = 0
        self._rank_of: dict[int, int] = {}
        # Also of a board whose making fails half way, or that other ranks could not make.
        self._release = weakref.finalize(self, _close_all, self._rank_of)
        self._ends = select.poll()
        for rank in self._others:
            descriptor = os.pidfd_open(pids[rank])
            self._rank_of[descriptor] = rank
            self._ends.register(descriptor, select.POLLIN)

    def signal(self, flag: bool) -> int:
        """Tell all ranks; returns the number of the signal, for `hear`."""
        return self._give(int(flag))

    def hear(self, number: int, timeout_s: float) -> list[bool]:
        """Every rank's flag of that signal, in rank order, once all ranks have given it.

        Raises TimeoutError, or RuntimeError if a rank has ended or closed its communicator before.
        """
        flags = self._flags(number, timeout_s)
        if _SUMMED in flags:
            raise RuntimeError(f"{self._named(flags.index(_SUMMED))} is in an agreement, this rank in an exchange")
        return [flag == 1 for flag in flags]

    def sum(self, numbers: Sequence[int], timeout_s: float) -> list[int]:
        """Each of the int64 `numbers` added over ranks; raises as `hear`. At most 64."""
        turn = _NUMBERS + (self._count + 1) % _TURNS * 8 * MOST_NUMBERS
        form = struct.Struct(f"{len(numbers)}q")
        form.pack_into(self._own, turn, *numbers)
        self._agree(timeout_s)
        of_ranks = [form.unpack_from(self._page(rank), turn) for rank in range(self._size)]
        return [sum(column) for column in zip(*of_ranks, strict=True)]

    def gather(self, text: bytes, timeout_s: float) -> list[bytes]:
        """Every rank's `text`, in rank order, part by part until the longest is read; raises as `hear`."""
        form, found = struct.Struct("q"), [bytearray() for _ in range(self._size)]
        room, done, longest = _PART - form.size, 0, len(text)
        while not done or done < longest:
            turn = _TEXTS + (self._count + 1) % _TURNS * _PART
            part = text[done : done + room]
            form.pack_into(self._own, turn, len(text))
            self._own[turn + form.size : turn + form.size + len(part)] = part
            self._agree(timeout_s)
            for rank in range(self._size):
                page = self._page(rank)
                (length,) = form.unpack_from(page, turn)
                longest = max(longest, length)
                found[rank] += page[turn + form.size : turn + form.size + min(room, max(0, length - done))]
            done += room
        return [bytes(text) for text in found]

    def _agree(self, timeout_s: float) -> None:
        """Return once all ranks have put down what they bring to this agreement."""
        flags = self._flags(self._give(_SUMMED), timeout_s)
        if set(flags) != {_SUMMED}:
            elsewhere = next(rank for rank, flag in enumerate(flags) if flag != _SUMMED)
            raise RuntimeError(f"{self._named(elsewhere)} is in an exchange, this rank in an agreement")

    def _page(self, rank: int) -> mmap.mmap:
        return self._others.get(rank) or self._own

    def _give(self, flag: int) -> int:
        self._count += 1
        self._own[_FLAGS + self._count % _TURNS] = flag
        self._own[_COUNT] = self._count & 255
        return self._count

    def _flags(self, number: int, timeout_s: float) -> list[int]:
        """The flags of that signal, once all ranks have given it and none has given up on it."""
        try:
            self._wait(number, timeout_s)
        except BaseException:
            self._own[_GAVE_UP] = _gave_up(number)
            raise
        for rank, page in self._others.items():
            if page[_GAVE_UP] == _gave_up(number):
                raise RuntimeError(f"{self._named(rank)} had given up when this rank came")
        return [self._page(rank)[_FLAGS + number % _TURNS] for rank in range(self._size)]

    def _wait(self, number: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for rank, page in self._others.items():
            spins, nap = 0, _NAP_S
            while (page[_COUNT] - number) & 255 > 127:
                spins += 1
                if spins > _SPINS:
                    self._require_there(rank, number, deadline)
                    time.sleep(nap)
                    nap = min(2 * nap, _LONGEST_NAP_S)

    def _require_there(self, rank: int, number: int, deadline: float) -> None:
        gone = [self._rank_of[descriptor] for descriptor, _ in self._ends.poll(0)]
        closed = [r for r, page in self._others.items() if page[_CLOSED]]
        if (self._others[rank][_COUNT] - number) & 255 <= 127:
            return  # it came after all
        for who in (*closed, *gone):
            raise RuntimeError(f"Connection closed by peer: {self._named(who)}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no signal of {self._named(rank)}")

    def close(self) -> None:
        """Tell all ranks that nothing will come any more."""
        self._own[_CLOSED] = 1
        self._release()
        self._ends = select.poll()


def _close_all(descriptors: dict[int, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[0])
