"""Run a test body on several real ranks: one process each, started in a tenth of a second, never left behind.

`run_ranks` is for bodies that are expected to end well, `start_ranks` for tests that kill, stop or lose a rank.

A rank is a process of a forkserver that has torch loaded already, because a fresh interpreter needs seconds for that.
The rendezvous is a file, so no ports. Results come back through one pipe per rank. There is no barrier at the end: a
rank that is done leaves, and what the others then see is what they would see in a real run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.rank_process import PRELOAD, Job, Report, main

_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(PRELOAD)

_SETTLE_SECONDS = 0.3  # how long reports of the other ranks are still awaited after the first failure


class RankFailed(AssertionError):
    """A rank raised, or died. `rank` is the first one that did, `traceback` what it said."""

    def __init__(self, rank: int, traceback: str) -> None:
        super().__init__(f"rank {rank} failed:\n{traceback}")
        self.rank = rank
        self.traceback = traceback


class RanksHung(AssertionError):
    """The time was up. `stacks` has the Python stack of every rank that was still there."""

    def __init__(self, timeout_s: float, stacks: dict[int, str]) -> None:
        listed = "\n".join(f"--- rank {rank} ---\n{stack}" for rank, stack in sorted(stacks.items()))
        super().__init__(f"ranks {sorted(stacks)} were not done after {timeout_s} s\n{listed}")
        self.stacks = stacks


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with a `value`, with an `error` (its traceback), or with neither: `exit_code` is set then."""

    rank: int
    value: Any = None
    error: str | None = None
    error_type: str | None = None
    exit_code: int | None = None
    time: float = field(default=0.0, compare=False)

    @property
    def ok(self) -> bool:
        return self.error is None and self.exit_code is None

    @property
    def killed_by(self) -> int | None:
        """The number of the signal that ended the rank, or None."""
        return -self.exit_code if self.exit_code is not None and self.exit_code < 0 else None


class RunningRanks:
    """Handles on live ranks: kill or stop one by number, then `collect` what became of all of them."""

    def __init__(self, jobs: list[Job], folder: Path) -> None:
        self.folder = folder
        self._processes = []
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._outcomes: dict[int, Outcome] = {}
        for job in jobs:
            here, there = _FORKSERVER.Pipe(duplex=False)
            process = _FORKSERVER.Process(target=main, args=(pickle.dumps(job), there), name=f"rank {job.rank}")
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    @property
    def world_size(self) -> int:
        return len(self._processes)

    def pid(self, rank: int) -> int:
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        """SIGKILL, SIGSTOP, SIGCONT, ... to one rank; a rank that is gone already is left alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid(rank), number)

    def wait_for_mark(self, rank: int, name: str, timeout_s: float = 30.0) -> None:
        """Wait until the body on `rank` called `mark(name)`."""
        path = self.folder / f"mark-{rank}-{name}"
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() > deadline or not self._processes[rank].is_alive():
                raise RankFailed(rank, f"never reached mark {name!r}")
            time.sleep(0.005)

    def poll(self, seconds: float) -> None:
        """Take in what ranks have to say, for at most `seconds`; returns early when something came."""
        open_pipes = {self._pipes[rank]: rank for rank in range(self.world_size) if rank not in self._outcomes}
        for ready in multiprocessing.connection.wait(list(open_pipes), timeout=max(0.0, seconds)):
            rank = open_pipes[ready]  # type: ignore[index]
            self._outcomes[rank] = self._outcome(rank)

    def _outcome(self, rank: int) -> Outcome:
        try:
            report: Report = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            process = self._processes[rank]
            process.join(5)
            return Outcome(rank, exit_code=process.exitcode if process.exitcode is not None else 1)
        return Outcome(rank, report.value, report.error, report.error_type, time=report.time)

    @property
    def missing(self) -> list[int]:
        """The ranks that have neither reported nor died."""
        return [rank for rank in range(self.world_size) if rank not in self._outcomes]

    @property
    def outcomes(self) -> dict[int, Outcome]:
        return dict(self._outcomes)

    def collect(self, timeout_s: float = 60.0, ranks: list[int] | None = None) -> list[Outcome]:
        """Outcomes in rank order (of `ranks`, or all); RanksHung with every stack if one is missing after the time."""
        wanted = list(range(self.world_size)) if ranks is None else ranks
        deadline = time.monotonic() + timeout_s
        while any(rank in self.missing for rank in wanted):
            if time.monotonic() > deadline:
                raise RanksHung(timeout_s, self.stacks())
            self.poll(deadline - time.monotonic())
        return [self._outcomes[rank] for rank in wanted]

    def stacks(self) -> dict[int, str]:
        """The Python stack of every rank that is still running (a stopped one cannot say where it is)."""
        waiting = self.missing
        for rank in waiting:
            self.send_signal(rank, signal.SIGUSR2)
        time.sleep(0.5)
        return {rank: _stack_text(self.folder / f"stack-{rank}") for rank in waiting}

    def end(self) -> None:
        """Leave no process behind. One that has reported leaves by itself, once it has written what it measured."""
        for rank, process in enumerate(self._processes):
            process.join(0.0 if rank in self.missing else 5.0)
            if process.is_alive():
                self.send_signal(rank, signal.SIGKILL)
        for process in self._processes:
            process.join(10)
            process.close()
        for pipe in self._pipes:
            pipe.close()


def _stack_text(path: Path) -> str:
    text = path.read_text() if path.exists() else ""
    return text or "(no stack: the process is stopped, or dead)\n"


@contextlib.contextmanager
def start_ranks(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    open_comm: bool = True,
    comm_timeout_s: float = 30.0,
    debug: str = "DETAIL",
    shared_memory: bool = True,
) -> Iterator[RunningRanks]:
    """Start `body(comm, *args)` on `world_size` ranks and hand out their handles; on leaving, all of them are ended.

    `body` is a function of a module (it is found by name in the child) and what it gets and returns is pickled.
    With `open_comm=False` it gets a `Seat` (rank, world_size, init_file) in the place of a Communicator.
    `debug` is TORCH_DISTRIBUTED_DEBUG; DETAIL makes torch check every collective by one more, which hides how torch
    fails without it, so tests of failure choose.
    """
    with tempfile.TemporaryDirectory(prefix="shardrun-ranks-") as name:
        folder = Path(name)
        call = pickle.dumps((body, args))
        measured = _coverage()
        jobs = [
            Job(rank, world_size, folder, call, open_comm, comm_timeout_s, debug, shared_memory, measured)
            for rank in range(world_size)
        ]
        ranks = RunningRanks(jobs, folder)
        try:
            yield ranks
        finally:
            ranks.end()


def run_ranks(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    open_comm: bool = True,
    comm_timeout_s: float = 30.0,
    debug: str = "DETAIL",
    shared_memory: bool = True,
) -> list[Any]:
    """What `body(comm, *args)` returned on every rank, in rank order.

    The first rank that fails ends the others, and RankFailed has its number and traceback. Not done after
    `timeout_s` seconds: RanksHung with the stack of every rank that was still there.
    """
    with start_ranks(
        world_size,
        body,
        *args,
        open_comm=open_comm,
        comm_timeout_s=comm_timeout_s,
        debug=debug,
        shared_memory=shared_memory,
    ) as ranks:
        deadline = time.monotonic() + timeout_s
        while ranks.missing:
            ranks.poll(deadline - time.monotonic())
            if any(not outcome.ok for outcome in ranks.outcomes.values()):
                raise _first_failure(ranks)
            if ranks.missing and time.monotonic() > deadline:
                raise RanksHung(timeout_s, ranks.stacks())
        return [ranks.outcomes[rank].value for rank in range(world_size)]


def _coverage() -> tuple[str, str] | None:
    """Config file and data file of the coverage measurement that this process is under, if it is."""
    measuring = sys.modules["coverage"].Coverage.current() if "coverage" in sys.modules else None
    if measuring is None or measuring.config.config_file is None:
        return None
    return str(measuring.config.config_file), str(measuring.config.data_file)


def _first_failure(ranks: RunningRanks) -> RankFailed:
    """The rank to blame: one that died without a word, else the earliest traceback; followers come after it."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while ranks.missing and time.monotonic() < deadline:
        ranks.poll(deadline - time.monotonic())
    failed = [outcome for outcome in ranks.outcomes.values() if not outcome.ok]
    first = min(failed, key=lambda outcome: (outcome.error is not None, outcome.time))
    others = [f"(rank {outcome.rank} followed: {_last_line(outcome)})" for outcome in failed if outcome is not first]
    return RankFailed(first.rank, "\n".join([first.error or _last_line(first), *others]))


def _last_line(outcome: Outcome) -> str:
    if outcome.error is not None:
        return outcome.error.strip().splitlines()[-1]
    if outcome.killed_by is not None:
        return f"died of signal {outcome.killed_by} ({signal.Signals(outcome.killed_by).name})"
    return f"left with exit code {outcome.exit_code} before it reported"
