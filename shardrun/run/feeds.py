"""What the workers of this host say and print, on its way to the screen and to their logs."""

from __future__ import annotations

import json
import os
import selectors
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from shardrun.run.worker_process import WorkerProcess

# What is said before anything has begun. All else, and whatever the ranks print, goes to the logs at once: it may be
# the last thing that anybody hears.
_TALK = frozenset({"resumed", "note"})


class Screen(Protocol):
    """Who shows what the ranks do and print; `event` returns the lines that belong into the log of the rank."""

    def event(self, rank: int, event: Mapping[str, Any]) -> list[str]: ...
    def output(self, rank: int, text: str) -> None: ...


class Feeds:
    """The pipes of all workers of one world on this host."""

    def __init__(self, screen: Screen, first_words: Sequence[str] = ()) -> None:
        """`first_words` begin the log of every rank."""
        self._screen = screen
        self._first_words = list(first_words)
        self._workers: list[WorkerProcess] = []
        self._selector = selectors.DefaultSelector()
        self._released = False
        self.total_steps: int | None = None
        self.nothing_to_do = False
        """Whether rank 0, if it runs here, has found the run finished."""

    def add(self, worker: WorkerProcess) -> None:
        """Listen to a worker that was just started."""
        self._workers.append(worker)
        self._selector.register(worker.out_fd, selectors.EVENT_READ, (worker, self._take_output))
        self._selector.register(worker.event_fd, selectors.EVENT_READ, (worker, self._take_events))
        worker.log.write(self._first_words)

    def wait(self, seconds: float) -> None:
        """Take what comes within this time, or only wait."""
        for key, _ in self._selector.select(seconds):
            worker, take = key.data
            self._read(worker, key.fd, take)

    def drain(self, worker: WorkerProcess) -> None:
        """Read what is still in the pipes; a process that escaped the session may hold them open for ever."""
        for fd, take in ((worker.event_fd, self._take_events), (worker.out_fd, self._take_output)):
            while fd in self._selector.get_map() and self._read(worker, fd, take):
                pass
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
                take(worker, b"")

    def write_log(self, worker: WorkerProcess, lines: Sequence[str]) -> None:
        """Append to the log of a rank; a log that cannot be written is a warning, once."""
        worker.log.write(list(lines))
        if problem := worker.log.take_problem():
            self._screen.event(worker.rank, {"event": "warning", "text": problem})

    def release_logs(self) -> None:
        """Something has begun: what was held back goes to the logs."""
        if not self._released:
            self._released = True
            for worker in self._workers:
                worker.log.release()
                self.write_log(worker, [])

    def close(self) -> None:
        """Listen to nobody any more."""
        self._selector.close()

    def _read(self, worker: WorkerProcess, fd: int, take: Callable[[WorkerProcess, bytes], None]) -> bool:
        try:
            chunk = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not chunk:
            self._selector.unregister(fd)
        take(worker, chunk)
        return bool(chunk)

    def _take_output(self, worker: WorkerProcess, chunk: bytes) -> None:
        for line in worker.output.feed(chunk) if chunk else worker.output.close():
            self._screen.output(worker.rank, line)
            self.release_logs()
            self.write_log(worker, [line])

    def _take_events(self, worker: WorkerProcess, chunk: bytes) -> None:
        for line in worker.events.feed(chunk):
            event = json.loads(line)
            self.total_steps = event.get("total_steps", self.total_steps)
            self.nothing_to_do |= event["event"] == "finished" and event.get("already", False)
            if event["event"] not in _TALK:
                self.release_logs()
            self.write_log(worker, self._screen.event(worker.rank, event))
