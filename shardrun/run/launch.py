"""Runs a job to its end: on one host or together with others, in one world or, after failures, in several.

No torch here. What happens within a world is in `one_world`, how several hosts come together in `reception` and
`joining`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from shardrun.checkpoint.store import newest
from shardrun.errors import LaunchError
from shardrun.run.council import Council, wait_for_go
from shardrun.run.feeds import Screen
from shardrun.run.gathering import Party, listening
from shardrun.run.joining import join
from shardrun.run.link import Link
from shardrun.run.one_world import OneWorld, Wishes
from shardrun.run.outcome import Outcome, cut_short
from shardrun.run.reception import Reception
from shardrun.run.restarts import announcement
from shardrun.run.tether import STOP_SIGNALS
from shardrun.run.worker_process import Job, Place, store_socket

__all__ = ["Screen", "launch"]


def launch(job: Job, screen: Screen, party: Party | None = None) -> Outcome:
    """Run `job` to its end. No process of it is left when this returns or raises.

    The caller owns the run's folder; of the hosts of a `party` that is node 0's. In the main thread the stop signals
    are taken over for that time. Raises LaunchError if a worker cannot be started, if there is no room for the launch's
    own small files, or if the hosts do not come together; UsageError if they would not run the same.
    """
    _hold_standard_streams()
    wishes = Wishes()
    with _signals(wishes.on_signal):
        if party is None:
            return _Launch(job, screen, wishes).run()
        try:
            with _gathered(party, screen, wishes) as hosts:
                return _Launch(job, screen, wishes, hosts).run()
        except _StoppedBeforeStart:
            return cut_short()


# ---- several hosts ---------------------------------------------------------------------------------------------------


class _StoppedBeforeStart(Exception):
    pass


@dataclass(frozen=True)
class _Hosts:
    """The hosts that came together; `listener` is node 0's, where they met and where the first store will be."""

    party: Party
    link: Link
    listener: socket.socket | None

    def ranks(self, world_size: int) -> dict[int, range]:
        return {node: self.party.hosts.ranks(world_size, node) for node in self.link.names}


@contextlib.contextmanager
def _gathered(party: Party, screen: Screen, wishes: Wishes) -> Iterator[_Hosts]:
    def tell(text: str) -> None:
        screen.event(0, {"event": "note", "text": text})

    def nap(seconds: float) -> None:
        time.sleep(seconds)
        if wishes.asked:
            raise _StoppedBeforeStart

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listening(party.hosts)) if party.hosts.leads else None
        link = join(party, tell, nap) if listener is None else Reception(party, listener, tell, nap).gather()
        stack.callback(link.close)
        tell(f"all {party.hosts.nnodes} hosts are there; this is {link.names[link.node]}")
        yield _Hosts(party, link, listener)


# ---- worlds ----------------------------------------------------------------------------------------------------------


class _Launch:
    """One world after the other, until one ends well or no other may follow."""

    def __init__(self, job: Job, screen: Screen, wishes: Wishes, hosts: _Hosts | None = None) -> None:
        self._job = job
        self._screen = screen
        self._wishes = wishes
        self._hosts = hosts
        self._restarts = 0
        self._announced: list[str] = []

    def run(self) -> Outcome:
        """The outcome of the last world."""
        before = newest(self._job.run_dir) if self._job.max_restarts else None
        has_saved = False
        while True:
            outcome, again = self._one_world(has_saved)
            if not again:
                return outcome
            self._restarts += 1
            found = newest(self._job.run_dir)
            has_saved = found != before
            self._announce(outcome, None if found is None else found.path)

    def _announce(self, outcome: Outcome, last: Path | None) -> None:
        text = announcement(outcome, self._restarts, self._job.max_restarts, last)
        self._announced = self._screen.event(
            0, {"event": "restart", "restart": self._restarts, "reason": outcome.reason, "text": text}
        )

    def _one_world(self, has_saved: bool) -> tuple[Outcome, bool]:
        job = self._job
        with contextlib.ExitStack() as stack:
            control = stack.enter_context(_control_folder())
            place, has_saved = stack.enter_context(self._place(control.name, has_saved))
            if has_saved and job.later is not None:
                job = replace(job, document=job.later)
            _write_job(job, control)
            council = None
            if self._hosts is not None:
                council = Council(self._hosts.link, self._hosts.ranks(job.world_size))
            with _starting(job):
                world = OneWorld(
                    job,
                    place,
                    self._screen,
                    control,
                    self._wishes,
                    council=council,
                    restarts_left=job.max_restarts - self._restarts,
                    first_words=self._announced,
                )
            stack.callback(world.end)
            with _starting(job):
                world.start()
            if place.store is not None:
                place.store.close()  # rank 0 alone has it now: when it is dead, nobody listens there any more
            verdict = world.watch()
            return world.outcome(verdict), verdict.again

    @contextlib.contextmanager
    def _place(self, name: str, has_saved: bool) -> Iterator[tuple[Place, bool]]:
        """Where this host stands in the next world; and, from node 0, whether an earlier world has saved."""
        size = self._job.world_size
        if self._hosts is None:
            with contextlib.ExitStack() as stack:
                with _starting(self._job):
                    store = stack.enter_context(store_socket()) if size > 1 else None
                address = store.getsockname() if store is not None else None
                yield Place(range(size), name, address, store), has_saved
            return
        link, hosts = self._hosts.link, self._hosts.party.hosts
        if link.leads:
            link.say("go", run_id=name, has_saved=has_saved)
        else:
            go = wait_for_go(link, self._wishes.of_another_host)
            if go is None:
                raise LaunchError(f"{link.names[0]} is gone before the start: {link.lost[0]}")
            name, has_saved = str(go["run_id"]), bool(go["has_saved"])
        ranks, address = hosts.ranks(size, link.node), (hosts.address, hosts.port)
        with contextlib.ExitStack() as stack:
            store = self._hosts.listener
            if store is not None and self._restarts:
                store = stack.enter_context(listening(hosts))
            yield Place(ranks, name, address, store, link.names[link.node]), has_saved


@contextlib.contextmanager
def _control_folder() -> Iterator[Path]:
    """A folder of this world alone."""
    control: Path | None = None
    try:
        with _room():
            control = Path(tempfile.mkdtemp(prefix="shardrun-"))
        yield control
    finally:
        if control is not None:
            shutil.rmtree(control, ignore_errors=True)


def _write_job(job: Job, control: Path) -> None:
    with _room():
        (control / "job.json").write_text(json.dumps(job.document))


@contextlib.contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        folder = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")
        raise LaunchError(
            f"{folder}: cannot be used for the launch's own files: {error.strerror}; make room there, or give "
            "another folder with TMPDIR=..."
        ) from error


@contextlib.contextmanager
def _starting(job: Job) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LaunchError(f"cannot start {job.command[0]}: {error.strerror}") from error


def _hold_standard_streams() -> None:
    """Give what was started with a closed stream an open one: a pipe in its place could not be handed to a worker."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


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
