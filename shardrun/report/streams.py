"""Writing to stdout and stderr, whoever reads them.

A reader that goes away (closed pipe, full disk, hung-up terminal) never ends a run: its stream falls silent. A reader
that pauses never holds one up between `attach` and `detach`: all is written by threads then that alone wait for it.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TextIO

from shardrun.run.outlet import Outlet

# Bytes that may wait for a reader that pauses: of what is told once, of steps and of what the ranks print (the logs
# have both), and of frames of a bar, which are stale a moment later.
ROOM_ONCE, ROOM_MANY, ROOM_BAR = 16 << 20, 4 << 20, 1 << 16
_outlets: dict[int, Outlet] = {}
# The threads stay behind in the parent.
os.register_at_fork(after_in_child=_outlets.clear)


def attach(left_out: Callable[[int], str]) -> None:
    """Write in threads from now on; `left_out` words that so many lines found no room."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or no file at all
            _outlets[id(stream)] = Outlet(stream, left_out, partial(_mute, stream))


def detach() -> None:
    """Wait a little for a reader that pauses, and write without threads again."""
    while _outlets:
        _outlets.popitem()[1].close()


def flush(stream: TextIO | None) -> None:
    """Wait a little until what was written to `stream` has left."""
    if (outlet := _outlets.get(id(stream))) is not None:
        outlet.flush()


def write(text: str, stream: TextIO | None, end: str = "\n", room: int = ROOM_ONCE) -> None:
    """Write `text` to `stream`, which never fails; a stream that is gone falls silent."""
    if stream is None:  # the program was started with this stream closed
        return
    if (outlet := _outlets.get(id(stream))) is not None:
        outlet.put(text + end, room)
        return
    try:
        try:
            stream.write(text + end)
        except UnicodeEncodeError:
            stream.write(text.encode("ascii", "backslashreplace").decode() + end)
        stream.flush()
    except (OSError, ValueError):
        _mute(stream)


def _mute(stream: TextIO) -> None:
    # What is left in the stream's buffer would raise once more when the interpreter closes it.
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class SilentWhenGone(io.TextIOBase):
    """A terminal that may hang up: writes to it never raise. rich writes from a thread of its own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        write(text, self._stream, end="", room=ROOM_BAR)
        return len(text)

    def flush(self) -> None:
        """Every write is flushed."""

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()
