"""Micro-batches in the order of their tasks, fetched ahead by worker processes that cannot outlive this one."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from shardrun.data.fetch import Fetcher, Task, prepare_worker
from shardrun.errors import ShardrunError

GRACE_S = 2.0


class Stream:
    """The micro-batches of an endless list of tasks, in order, from a DataLoader."""

    def __init__(self, fetcher: Fetcher, tasks: Iterator[Task], workers: int, prefetch: int, *, pin: bool) -> None:
        self._loader: DataLoader[tuple[int, Any]] = DataLoader(
            cast("Dataset[tuple[int, Any]]", fetcher),
            batch_size=None,  # a task is a whole micro-batch
            sampler=_Once(tasks),
            collate_fn=cast(Any, _as_it_is),
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
            prefetch_factor=prefetch if workers else None,
            pin_memory=pin,
            worker_init_fn=prepare_worker if workers else None,
            generator=torch.Generator(),  # otherwise each iterator draws a number from torch's global stream
        )
        self._batches: Iterator[tuple[int, Any]] | None = None
        self._owner = os.getpid()
        self.closed = False
        _open_streams.add(self)

    def take(self, count: int) -> Iterator[tuple[int, Any]]:
        """The next `count` micro-batches, lazily. An error closes the stream, so that nothing is skipped."""
        for _ in range(count):
            if self.closed:
                return
            try:
                if self._batches is None:
                    self._batches = self._start()
                batch = next(self._batches)
            except BaseException as error:
                self.closed = True
                self._explain(error)
                raise
            yield batch

    def _explain(self, error: BaseException) -> None:
        """Raise a plain error if the cause is a worker that died: what torch raises depends on the moment it died."""
        lost = isinstance(error, EOFError | ConnectionError) or "exited unexpectedly" in str(error)
        if not lost or self._loader.num_workers == 0 or self._batches is None:
            return
        for worker in cast(Any, self._batches)._workers:
            worker.join(timeout=1.0)  # its end is seen a little after its connection broke
            if worker.exitcode is not None:
                text = f"data worker {worker.pid} ended with exit code {worker.exitcode} while it fetched micro-batches"
                if worker.exitcode == -signal.SIGKILL:
                    text += "; most often for lack of memory: try fewer data.workers or a smaller data.prefetch"
                raise ShardrunError(text) from error

    def close(self) -> None:
        """End the workers: torch's orderly way, but by force where the data set's own code keeps one busy."""
        self.closed = True
        batches, self._batches = self._batches, None
        if batches is None or self._loader.num_workers == 0 or self._owner != os.getpid():
            return  # a forked child that inherited this object has no say over its parent's workers
        workers = cast(Any, batches)._workers
        # torch waits 5 seconds for each and then sends a SIGTERM, which the workers leave to their parent.
        impatience = threading.Timer(GRACE_S, lambda: [worker.kill() for worker in workers])
        impatience.daemon = True
        impatience.start()
        cast(Any, batches)._shutdown_workers()
        impatience.cancel()
        for worker in workers:
            worker.join()

    def _start(self) -> Iterator[tuple[int, Any]]:
        """Start the workers, leaving the reaction of this process to a dying child as it was.

        torch's own SIGCHLD handler raises wherever the main thread happens to be, which may be inside a commit. A
        dead worker is found all the same, when its batch is waited for.
        """
        before = signal.getsignal(signal.SIGCHLD)
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork with threads about; the children here run only the data set's own code.
            warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
            batches: Iterator[tuple[int, Any]] = iter(self._loader)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCHLD) is not before:
            signal.signal(signal.SIGCHLD, before if before is not None else signal.SIG_DFL)
        return batches


_open_streams: weakref.WeakSet[Stream] = weakref.WeakSet()


@atexit.register  # runs before multiprocessing's own exit, which would wait for ever for a worker that keeps working
def _close_all() -> None:
    for stream in list(_open_streams):
        stream.close()


class _Once:
    """A sampler over an iterator."""

    def __init__(self, tasks: Iterator[Task]) -> None:
        self._tasks = tasks

    def __iter__(self) -> Iterator[Task]:
        return self._tasks


def _as_it_is(item: tuple[int, Any]) -> tuple[int, Any]:
    return item
