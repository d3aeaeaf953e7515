"""One connection between two launchers: JSON messages, a line each. Nothing here ever waits for the other side."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

from shardrun.run.streams import LineSplitter

Message = dict[str, Any]
BEAT_S = 1.0
_CLOSING_S = 2.0
_LONGEST = 1 << 24
_LONGEST_GREETING = 1 << 20


class Wire:
    """Sends and receives messages; `ended` says why nothing more can come, once that is so."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._lines = LineSplitter(_LONGEST)
        self._inbox: list[Message] = []
        self._received = 0
        self._waiting = b""
        self._sent_at = 0.0
        self.heard_at = time.monotonic()
        self.ended: str | None = None
        self.trusted = False
        """Whether the other side has said who it is; before, it may not say much."""

    @property
    def far_address(self) -> str:
        """The other side's address, as a number."""
        try:
            return str(self._socket.getpeername()[0])
        except OSError:
            return "unknown"

    def send(self, say: str, **fields: Any) -> None:
        """Send one message; what does not fit into the connection now goes with the next call of anything here."""
        self._waiting += json.dumps({"say": say, **fields}, default=str).encode() + b"\n"
        self._sent_at = time.monotonic()
        self._flush()

    def beat(self) -> None:
        """Let the other side hear that this one lives."""
        if time.monotonic() - self._sent_at > BEAT_S:
            self.send("beat")
        self._flush()

    def receive(self) -> list[Message]:
        """All messages that have come, beats left out."""
        self._take_in()
        messages, self._inbox = self._inbox, []
        return messages

    def next(self) -> Message | None:
        """The first message that has come and was not yet received."""
        self._take_in()
        return self._inbox.pop(0) if self._inbox else None

    def _take_in(self) -> None:
        while self.ended is None:
            try:
                chunk = self._socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError as error:
                self.ended = f"the connection broke ({error.strerror})"
                break
            if not chunk:
                self.ended = "the connection was closed"
                break
            self.heard_at = time.monotonic()
            self._received += len(chunk)
            try:
                messages = [_parsed(line) for line in self._lines.feed(chunk)]
                self._inbox += [message for message in messages if message["say"] != "beat"]
            except (ValueError, RecursionError):
                self.ended = "it does not speak as a launcher of shardrun"
            if self._received > _LONGEST_GREETING and not self.trusted:
                self.ended = "it says too much without saying who it is"

    def close(self) -> None:
        """Close, once the other side has all that was sent or has gone, or after two seconds."""
        # A connection that is closed with something unread in it takes along what the other side has not read yet.
        end = time.monotonic() + _CLOSING_S
        with contextlib.suppress(OSError):
            self._socket.settimeout(_CLOSING_S)
            self._socket.sendall(self._waiting)
            self._socket.shutdown(socket.SHUT_WR)
            while self.ended is None and time.monotonic() < end and self._socket.recv(1 << 16):
                pass
        self._socket.close()

    def drop(self) -> None:
        """Close at once."""
        self._socket.close()

    def _flush(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[self._socket.send(self._waiting) :]
        except BlockingIOError:
            pass
        except OSError:
            self._waiting = b""  # what has come before can still be received, and then the end of it


def _parsed(line: str) -> Message:
    message = json.loads(line)
    if not isinstance(message, dict) or not isinstance(message.get("say"), str):
        raise ValueError(line)
    return message
