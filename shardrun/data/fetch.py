"""Fetching one micro-batch, in a worker process or in the trainer's own, with the same result."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from shardrun.data.seeding import Purpose, derive_seed, seed_host

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Task:
    """One micro-batch to fetch: its number in the window, its first place in the epoch's order, its samples."""

    epoch: int
    number: int
    place: int
    indices: tuple[int, ...]


class Fetcher:
    """Turns a `Task` into (number, batch); items and collation are seeded, the caller's streams stay as they are."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed

    def __getitem__(self, task: Task) -> tuple[int, Any]:
        if get_worker_info() is not None:  # the process is ours: nothing to put back
            return task.number, self._fetch(task)
        with kept_streams(), one_thread():
            return task.number, self._fetch(task)

    def _fetch(self, task: Task) -> Any:
        samples = [self._item(task, index) for index in task.indices]
        seed_host(derive_seed(Purpose.COLLATE, self._seed, task.epoch, task.place))
        try:
            return self._collate(samples)
        except Exception as error:
            error.add_note(f"while putting samples {_short(task.indices)} of epoch {task.epoch + 1} together")
            raise

    def _item(self, task: Task, index: int) -> Any:
        seed_host(derive_seed(Purpose.ITEM, self._seed, task.epoch, index))
        try:
            return self._dataset[index]
        except Exception as error:
            error.add_note(f"while fetching sample {index} of epoch {task.epoch + 1} ({type(self._dataset).__name__})")
            raise


@contextmanager
def kept_streams() -> Iterator[None]:
    """Python's, numpy's and torch's CPU random streams after the block are what they were before it."""
    python, numpy, cpu = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes on one thread, as it does in a DataLoader's worker: sums come out the same in both."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def prepare_worker(_worker: int) -> None:
    """First act of a worker process: leave signals to the parent, and end with it.

    A Ctrl-C or a scheduler's SIGTERM reaches the whole process group. The trainer answers it by finishing the step,
    for which it needs its data; so a worker ends only when told, or at once when the trainer is gone.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # a handler, not SIG_IGN, which programs started from here would inherit
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        os._exit(1)  # the trainer was gone before the line above


def _short(indices: Sequence[int]) -> str:
    shown = ", ".join(str(index) for index in indices[:8])
    return f"[{shown}, ...]" if len(indices) > 8 else f"[{shown}]"
