"""Starts one worker per rank on this host, watches them, and ends them together. No torch here.

[Note: how a run ends]
A worker is done when it left its mark of being done; everything else is a failure. The first failure gives the others
two seconds to come out of their collective and say what they saw, then they are killed with all that they started.
A request to stop (Ctrl-C, SIGTERM, SIGUSR1, a closed terminal) is passed on once, and the save that it causes is waited
for however long it takes; a second Ctrl-C kills. Each worker leads a session of its own: a Ctrl-C in the terminal
reaches the launcher alone, and a whole session can be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from shardrun.errors import LaunchError
from shardrun.run.exit_file import forget_exit, write_exit
from shardrun.run.outcome import Outcome, judge
from shardrun.run.tether import SAME_WISH_S, STOP_SIGNALS
from shardrun.run.worker_process import Job, WorkerProcess, start_worker, store_socket

GRACE_S = 2.0
TEARDOWN_S = 10.0
_POLL_S = 0.05
# What is said before anything has begun. All else, and whatever the ranks print, goes to the logs at once: it may be
# the last thing that anybody hears.
_TALK = frozenset({"resumed", "note"})


class Screen(Protocol):
    """Who shows what the ranks do and print; `event` returns the lines that belong into the log of the rank."""

    def event(self, rank: int, event: Mapping[str, Any]) -> list[str]: ...
    def output(self, rank: int, text: str) -> None: ...


def launch(job: Job, screen: Screen) -> Outcome:
    """Run `job` to its end. No process of it is left when this returns or raises.

    The caller owns the run's folder. In the main thread the stop signals are taken over for that time. Raises
    LaunchError if a worker cannot be started, or if there is no room for the launch's own small files.
    """
    with _control_folder(job) as control:
        with _starting(job):
            run = _Run(job, screen, control)
        try:
            with _signals(run.on_signal):
                with _starting(job):
                    run.start()
                run.watch()
            return run.outcome()
        finally:
            run.end()


@contextlib.contextmanager
def _control_folder(job: Job) -> Iterator[Path]:
    """A folder of this launch alone, with the job in it."""
    control: Path | None = None
    try:
        try:
            control = Path(tempfile.mkdtemp(prefix="shardrun-"))
            (control / "job.json").write_text(json.dumps(job.document))
        except OSError as error:
            folder = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")
            raise LaunchError(
                f"{folder}: cannot be used for the launch's own files: {error.strerror}; make room there, or give "
                "another folder with TMPDIR=..."
            ) from error
        yield control
    finally:
        if control is not None:
            shutil.rmtree(control, ignore_errors=True)


@contextlib.contextmanager
def _starting(job: Job) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LaunchError(f"cannot start {job.command[0]}: {error.strerror}") from error


class _Run:
    def __init__(self, job: Job, screen: Screen, control: Path) -> None:
        self._job = job
        self._screen = screen
        self._control = control
        self._workers: list[WorkerProcess] = []
        self._selector = selectors.DefaultSelector()
        self._wishes: list[tuple[int, float]] = []
        self._stopping_since: float | None = None
        self._interrupted = False
        self._kill_at: float | None = None
        self._total_steps: int | None = None
        self._nothing_to_do = False
        self._logs_released = False
        self._put_exit_back: Callable[[], None] | None = None
        self._life_fd = -1

    # ---- start -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all workers; none waits for another. OSError if one cannot be started."""
        self._put_exit_back = forget_exit(self._job.run_dir)
        life_read, self._life_fd = os.pipe()
        store: socket.socket | None = None
        try:
            store = store_socket() if self._job.world_size > 1 else None
            for rank in range(self._job.world_size):
                worker = start_worker(self._job, rank, self._control, life_read, store)
                self._workers.append(worker)
                self._selector.register(worker.out_fd, selectors.EVENT_READ, (worker, self._take_output))
                self._selector.register(worker.event_fd, selectors.EVENT_READ, (worker, self._take_events))
        finally:
            os.close(life_read)
            if store is not None:
                store.close()

    # ---- watch -----------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Until every worker is over: show what they say, pass requests on, end all when one fails."""
        while any(worker.end is None for worker in self._workers):
            for key, _ in self._selector.select(_POLL_S):
                worker, take = key.data
                self._read(worker, key.fd, take)
            for worker in self._workers:
                if worker.end is None and worker.has_left():
                    worker.reap()
                    self._drain(worker)
            self._pass_wishes_on()
            self._end_the_rest()

    def _read(self, worker: WorkerProcess, fd: int, take: Callable[[WorkerProcess, bytes], None]) -> bool:
        try:
            chunk = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not chunk:
            self._selector.unregister(fd)
        take(worker, chunk)
        return bool(chunk)

    def _drain(self, worker: WorkerProcess) -> None:
        """Read what is still in the pipes; a process that escaped the session may hold them open for ever."""
        for fd, take in ((worker.event_fd, self._take_events), (worker.out_fd, self._take_output)):
            while fd in self._selector.get_map() and self._read(worker, fd, take):
                pass
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
                take(worker, b"")

    def _take_output(self, worker: WorkerProcess, chunk: bytes) -> None:
        for line in worker.output.feed(chunk) if chunk else worker.output.close():
            self._screen.output(worker.rank, line)
            self._release_logs()
            self._write_log(worker, [line])

    def _take_events(self, worker: WorkerProcess, chunk: bytes) -> None:
        for line in worker.events.feed(chunk):
            event = json.loads(line)
            self._total_steps = event.get("total_steps", self._total_steps)
            self._nothing_to_do |= event["event"] == "finished" and event.get("already", False)
            if event["event"] not in _TALK:
                self._release_logs()
            self._write_log(worker, self._screen.event(worker.rank, event))

    def _write_log(self, worker: WorkerProcess, lines: list[str]) -> None:
        worker.log.write(lines)
        if problem := worker.log.take_problem():
            self._screen.event(worker.rank, {"event": "warning", "text": problem})

    def _release_logs(self) -> None:
        if self._logs_released:
            return
        self._logs_released = True
        for worker in self._workers:
            worker.log.release()
            self._write_log(worker, [])

    # ---- end -------------------------------------------------------------------------------------------------------

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Note the wish; `watch` acts on it."""
        self._wishes.append((number, time.monotonic()))

    def _pass_wishes_on(self) -> None:
        while self._wishes:
            number, when = self._wishes.pop(0)
            if self._stopping_since is None:
                self._stopping_since = when
                self._screen.event(0, {"event": "stopping", "signal": signal.Signals(number).name})
                for worker in self._workers:
                    if worker.end is None:
                        os.kill(worker.process.pid, signal.SIGTERM)
            elif number == signal.SIGINT and when - self._stopping_since > SAME_WISH_S:
                self._interrupted = True
                self._kill_at = 0.0

    def _end_the_rest(self) -> None:
        left = [worker for worker in self._workers if worker.end is None]
        if self._kill_at is None:
            if any(worker.is_failing for worker in self._workers):
                self._kill_at = time.monotonic() + GRACE_S
            elif all(worker.is_done for worker in left):
                self._kill_at = time.monotonic() + TEARDOWN_S
        elif time.monotonic() >= self._kill_at:
            for worker in left:
                worker.ended_by_us = True
                worker.kill()

    def outcome(self) -> Outcome:
        """Judge the ends of all workers; writes the last words of failed ranks to their logs, and exit.json."""
        outcome = judge(
            [worker.end for worker in self._workers if worker.end is not None],
            self._total_steps,
            stopping=self._stopping_since is not None,
            interrupted=self._interrupted,
        )
        if outcome.exit_code == 0 and self._nothing_to_do:
            for worker in self._workers:
                worker.log.take_back()
            if self._put_exit_back is not None:
                self._put_exit_back()
            else:
                write_exit(self._job.run_dir, outcome)
            return outcome
        self._release_logs()
        for worker, end in zip(self._workers, outcome.ends, strict=True):
            if end.failure is not None:
                self._write_log(worker, end.failure.traceback.splitlines())
        write_exit(self._job.run_dir, outcome)
        return outcome

    def end(self) -> None:
        """Leave nothing behind, however the run came here."""
        for worker in self._workers:
            worker.close()
        self._selector.close()
        if self._life_fd >= 0:
            os.close(self._life_fd)


@contextlib.contextmanager
def _signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    numbers = [*STOP_SIGNALS]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    try:
        before = {number: signal.signal(number, handler) for number in numbers}
    except ValueError:  # not the main thread: whoever called has the signals
        before = {}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
