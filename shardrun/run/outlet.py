"""A stream whose reader may pause (Ctrl-S, a pager, a stalled FIFO): who writes to it never waits for the reader."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

PATIENCE_S = 2.0
# At most a pipe's atomic write: longer ones would hide for long that a slow reader does read.
_PIECE = 4096


class Outlet:
    """Writes to `stream` from a daemon thread. OSError or ValueError if the stream has no descriptor.

    `left_out(n)` is the line that stands for `n` texts for which there was no room; `gone()` is called, in the thread,
    when a write failed: the outlet falls silent.
    """

    def __init__(self, stream: TextIO, left_out: Callable[[int], str], gone: Callable[[], None]) -> None:
        stream.flush()
        # Past the stream's own buffer: its lock, held by a thread that waits, would stop the interpreter at its exit.
        self._fd = stream.fileno()
        self._encoding, self._errors = stream.encoding or "utf-8", stream.errors or "strict"
        self._left_out, self._gone = left_out, gone
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._bytes = 0  # those of a write under way counted in
        self._missing = 0
        self._moved = time.monotonic()
        self._silent = self._closed = False
        threading.Thread(target=self._run, name="outlet", daemon=True).start()

    def put(self, text: str, room: int) -> None:
        """Hand `text` over, unless more than `room` bytes wait: then it is left out, and so are the next ones until
        half of that has been read.
        """
        data = self._encoded(text)
        with self._changed:
            if self._silent:
                return
            if self._bytes + len(data) > (room // 2 if self._missing else room):
                self._missing += 1
                return
            if self._missing:
                data, self._missing = self._encoded(self._left_out(self._missing)) + data, 0
            self._waiting.append(data)
            self._bytes += len(data)
            self._changed.notify_all()

    def flush(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until all is written, or until nothing was read for `patience_s`, or for a Ctrl-C."""
        began = time.monotonic()
        with contextlib.suppress(KeyboardInterrupt), self._changed:
            while self._bytes and time.monotonic() - max(began, self._moved) < patience_s:
                self._changed.wait(0.1)

    def close(self) -> None:
        """Flush and end; what nobody read is dropped."""
        self.flush()
        with self._changed:
            self._closed = True
            self._drop()

    def _encoded(self, text: str) -> bytes:
        try:
            return text.encode(self._encoding, self._errors)
        except UnicodeEncodeError:
            return text.encode("ascii", "backslashreplace")

    def _drop(self) -> None:
        self._silent = True
        self._waiting.clear()
        self._bytes = 0
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closed:
                        return
                    self._changed.wait()
                data = b"".join(self._waiting)
                self._waiting.clear()
            try:
                self._write(data)
            except OSError:
                self._gone()
                with self._changed:
                    self._drop()

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left and not self._closed:
            try:
                count = os.write(self._fd, left[:_PIECE])
            except BlockingIOError:  # somebody who shares the terminal made it so
                select.select([], [self._fd], [], 1.0)
                continue
            left = left[count:]
            with self._changed:
                self._bytes = max(0, self._bytes - count)
                self._moved = time.monotonic()
                self._changed.notify_all()
