"""A worker's ties to the process that started it: life, requests to stop, events, status, errors. No torch here.

Started by `shardrun train`, a worker finds them in its environment (SHARDRUN_...). Under torchrun there is no
such parent: the status stays in the process and events go to the caller's own screen.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Self

from shardrun.errors import StoppedAfterSave
from shardrun.run import failure
from shardrun.run.failure import Failure, Seen
from shardrun.run.status import StatusFile

EventSink = Callable[[int, Mapping[str, Any]], object]
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# A signal that reaches a worker twice (from the terminal and from a launcher) is not a second wish.
SAME_WISH_S = 0.1
_PR_SET_PDEATHSIG = 1


class EventChannel:
    """Writes events as JSON lines to a pipe; a parent that is gone is no error (its worker is about to be ended)."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def __call__(self, rank: int, event: Mapping[str, Any]) -> None:
        left = memoryview(json.dumps(event, default=str).encode() + b"\n")
        with self._lock, contextlib.suppress(BrokenPipeError):
            while left:
                left = left[os.write(self._fd, left) :]


class Tether:
    """One worker's ties; made once, in the main thread, by `from_env`, before torch is imported."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        status: StatusFile,
        sink: EventSink,
        error_path: Path | None,
        is_child: bool,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.status = status
        self.failure: Failure | None = None
        """What `run` caught, if anything."""
        self.seen: Seen | None = None
        """What the communicator knows of its first failure; for the body of `run` to say."""
        self.before_interrupt: Callable[[], None] | None = None
        """Called on a second Ctrl-C, right before the process leaves with 130, where no launcher says how it ended."""
        self._sink = sink
        self._error_path = error_path
        self._is_child = is_child
        self._stop_asked: float | None = None

    @classmethod
    def from_env(cls, sink: EventSink | None = None, *, saves: bool = True) -> Self:
        """Take up the ties that the environment names: dies with the parent, SIGTERM, SIGUSR1 and SIGINT ask to stop.

        `sink` gets the events as sink(rank, event) where no parent reads them; without one they are dropped. A worker
        that never `saves` is ended by those signals at once, by one that came before this call too.
        """
        env = os.environ
        status = env.get("SHARDRUN_STATUS")
        error = env.get("SHARDRUN_ERROR")
        event_fd = _own_fd("SHARDRUN_EVENT_FD")
        life_fd = _own_fd("SHARDRUN_LIFE_FD")
        _own_fd("SHARDRUN_STORE_FD")  # the communicator takes it up
        tether = cls(
            rank=int(env.get("RANK", "0")),
            world_size=int(env.get("WORLD_SIZE", "1")),
            status=StatusFile(Path(status) if status else None),
            sink=EventChannel(event_fd) if event_fd is not None else sink or (lambda rank, event: None),
            error_path=Path(error) if error else None,
            is_child=life_fd is not None,
        )
        if life_fd is not None:
            _die_with_parent(life_fd)
        for number in STOP_SIGNALS:
            signal.signal(number, tether._on_signal if saves else signal.SIG_DFL)
        _leave_forks_alone()
        # The launcher starts its workers with these blocked, so that none is lost before there is a handler.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return tether

    @property
    def stop_requested(self) -> bool:
        """Whether somebody asked to finish the step, save and leave. Ranks may see it at different steps."""
        return self._stop_asked is not None

    def job(self) -> dict[str, Any]:
        """The job that the launcher wrote: config, run_dir, options."""
        job: dict[str, Any] = json.loads(Path(os.environ["SHARDRUN_JOB"]).read_text())
        return job

    def send(self, kind: str, **fields: Any) -> None:
        """Send one event: start, resumed, step, eval, checkpoint, note, warning, finished or stopped."""
        self._sink(self.rank, {"event": kind, "rank": self.rank, **fields})

    def run(self, body: Callable[[Self], int]) -> int:
        """Run `body` and return the exit code for this process.

        The mark of being done is set only if `body` returns 0 or 75 (or raises StoppedAfterSave) by itself; anything
        that it raises, SystemExit included, is written for the launcher and kept in `failure`.
        """
        try:
            code = body(self)
        except StoppedAfterSave:
            code = StoppedAfterSave.exit_code
        except BaseException as error:
            return self.write_error(error).exit_code
        if code in (0, StoppedAfterSave.exit_code):
            self.status.mark_done(code)
        return code

    def write_error(self, error: BaseException) -> Failure:
        """Write what `error` means, with the step and phase of this worker's status, for the launcher to show."""
        self.failure = failure.describe(error, self.rank, self.status.status, self.seen, self.world_size)
        if self._error_path is not None:
            failure.write(self.failure, self._error_path)
        return self.failure

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._stop_asked is None:
            self._stop_asked = now
        elif number == signal.SIGINT and not self._is_child and now - self._stop_asked > SAME_WISH_S:
            if self.before_interrupt is not None:
                self.before_interrupt()
            # Nothing on disk is half done at any moment, and no code may go on from here.
            os._exit(130)


def _own_fd(name: str) -> int | None:
    """The descriptor that the environment names, closed to programs that this worker may start."""
    if name not in os.environ:
        return None
    fd = int(os.environ[name])
    os.set_inheritable(fd, False)
    return fd


def _leave_forks_alone() -> None:
    """Forked processes (loader workers, pools) can be ended by SIGTERM; a Ctrl-C is for the worker to act on."""
    mask = threading.local()  # blocked while forking: a signal may come before the child has its own answer to it

    def before_fork() -> None:
        mask.saved = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask.saved)

    def in_child() -> None:
        with contextlib.suppress(ValueError):  # forked while another interpreter was current
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask.saved)

    os.register_at_fork(before=before_fork, after_in_parent=in_parent, after_in_child=in_child)


def _die_with_parent(life_fd: int) -> None:
    """End this process when the parent does, and processes forked from its main thread with it."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        from_main = False

        # The signal follows the thread that forked, so only children of the thread that lives longest may have it.
        def before_fork() -> None:
            nonlocal from_main
            from_main = threading.current_thread() is threading.main_thread()

        def in_child() -> None:
            if from_main:
                prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

        os.register_at_fork(before=before_fork, after_in_child=in_child)

    def watch() -> None:
        while os.read(life_fd, 1):
            pass
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="life", daemon=True).start()
