"""The small mapped file in which a worker keeps where it is, so that a killed one can still be named."""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"shrdrun1"
_PLACE = struct.Struct("<qqd24s")  # step, collective, time, phase
_DONE = struct.Struct("<Bb")  # whether done, exit code
_PLACE_AT = len(_MAGIC)
_DONE_AT = _PLACE_AT + _PLACE.size
SIZE = 64

START_UP = "start-up"


@dataclass(frozen=True)
class Status:
    """Where a worker was when it last said so. `since` is the time (seconds of the epoch) at which it came there."""

    step: int = 0
    phase: str = START_UP
    collective: int = 0
    since: float = 0.0
    done: bool = False
    code: int = 0


class StatusFile:
    """Writes one worker's status; without a path the status stays in this process.

    A write is a few microseconds of memory copies without locks. A reader may see half of it: that is a step with the
    phase before it, which misleads nobody. The mark of being done is one byte of its own.
    """

    def __init__(self, path: Path | None) -> None:
        if path is None:
            self._map = mmap.mmap(-1, SIZE)
        else:
            with path.open("w+b") as file:
                file.truncate(SIZE)
                self._map = mmap.mmap(file.fileno(), SIZE)
        self._map[:_PLACE_AT] = _MAGIC
        self.set(0, START_UP, 0)

    def set(self, step: int, phase: str, collective: int) -> None:
        """Say where this worker is: the step under way, its phase (24 bytes of it), the number of the collective."""
        _PLACE.pack_into(self._map, _PLACE_AT, step, collective, time.time(), phase.encode()[:24])

    def mark_done(self, code: int = 0) -> None:
        """Say that all work is done and what remains is to leave with `code`."""
        _DONE.pack_into(self._map, _DONE_AT, 1, code)

    @property
    def status(self) -> Status:
        """What a reader sees now."""
        return _decoded(self._map[:])


def read(path: Path) -> Status:
    """The status in `path`; the one of a worker that has not begun if it has written none."""
    try:
        return _decoded(path.read_bytes())
    except FileNotFoundError:
        return Status()


def _decoded(raw: bytes) -> Status:
    if len(raw) < SIZE or not raw.startswith(_MAGIC):
        return Status()
    step, collective, since, phase = _PLACE.unpack_from(raw, _PLACE_AT)
    done, code = _DONE.unpack_from(raw, _DONE_AT)
    return Status(step, phase.rstrip(b"\0").decode(errors="replace"), collective, since, bool(done), code)
