"""Faults on purpose: a rank that fails, waits, hangs, stops, dies or lies at a place in a step, by a plan of one line.

    kill rank 1 at reduce:1 of step 3; delay rank 0 by 0.5 s at gather of every step

    PLAN   one or more faults with ";" between them
    FAULT  fail  rank R WHERE                    an exception, as user code could raise it
           delay rank R by T s WHERE             late, but not wrong
           hang  rank R [for T s] WHERE          alive and silent, for ever or for a time
           stop  rank R [for T s] WHERE          SIGSTOP, and SIGCONT after a time if one is given
           kill  rank R WHERE                    SIGKILL
           lie   rank R about fingerprint WHERE  the next comparison is told of another call
           lie   rank R about vote WHERE         the next all-reduce has 0 for its first number: a no, if it is the vote
           lie   rank R about parameter [PATH] WHERE    one bit of its first element is flipped, on this rank alone
    WHERE  at PLACE, or T s after PLACE (stop and kill; the rank goes on meanwhile) [of step S | of every step]
    PLACE  PHASE (where it begins), PHASE:N (its N-th collective), collective K (the K-th, of the step if one is named)

Without a step a fault strikes at the first such place. What it does it does to this process and on the real wire;
nothing of the step knows of it. Tests and `shardrun train --fault` share this; it is for finding out, not for training.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardrun.comm.fault_text import FOR_EVER_S, PHASES, STEP_PHASES, Fault, read
from shardrun.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from shardrun.comm.communicator import Communicator
    from shardrun.comm.world_state import Observer

__all__ = ["PHASES", "STEP_PHASES", "Fault", "InjectedFault", "Plan", "plan"]

_alarms: list[subprocess.Popen[bytes]] = []


class InjectedFault(RuntimeError):
    """What `fail` raises. None of shardrun's own errors, as an error in a user's code is none."""


@dataclass(frozen=True)
class Plan:
    """Faults of all ranks; made by `plan`."""

    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        return "; ".join(fault.text for fault in self.faults)

    def observer(
        self,
        rank: int,
        *,
        begun: int = 0,
        then: Observer | None = None,
        step: Callable[[], int] | None = None,
        parameters: Mapping[str, Tensor] | None = None,
    ) -> Observer:
        """The observer that makes the faults of `rank` happen in its process; for a rank without any too.

        `begun`: how many collectives the communicator has begun by now (its `collective`). `then`: another observer,
        called first, so that it still hears of the place. `step`: tells the number of the step under way; without it
        steps are counted from 1 by their phase collect. `parameters`: what `lie about parameter` may flip.
        """
        own = [fault for fault in self.faults if fault.rank == rank]
        for fault in own:
            if fault.about == "parameter" and (not parameters or fault.path not in (None, *parameters)):
                known = ", ".join(parameters or ()) or "none were given"
                raise UsageError(f"fault {fault.text!r}: no such parameter on rank {rank}; possible: {known}")
        return _Watch(own, begun, then, step, parameters)

    def install(
        self,
        comm: Communicator,
        *,
        step: Callable[[], int] | None = None,
        parameters: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Put it into the world that `comm` belongs to, beside the observer that is there; local."""
        rank = (comm.parent or comm).rank
        comm.observer = self.observer(rank, begun=comm.collective, then=comm.observer, step=step, parameters=parameters)


def plan(text: str, world_size: int | None = None) -> Plan:
    """Read a plan; UsageError with every fault in it that cannot be meant, and the words that are possible."""
    return Plan(read(text, world_size))


class _Watch:
    """An observer that knows where its rank is, and strikes there."""

    def __init__(
        self,
        faults: Sequence[Fault],
        begun: int,
        then: Observer | None,
        step: Callable[[], int] | None,
        parameters: Mapping[str, Tensor] | None,
    ) -> None:
        self._faults = faults
        self._then = then
        self._step = step
        self._parameters = parameters
        self._collective = self._before_step = begun
        self._steps = 0
        self._nth = 0
        self._struck: set[tuple[int, int]] = set()

    def __call__(self, phase: str, collective: int) -> None:
        begun, self._collective = self._collective, collective
        if collective == begun:  # a phase begins; a collective would have had a number of its own
            self._nth = 0
            if phase == "collect":
                self._steps += 1
                self._before_step = begun
        else:
            self._nth += 1
        if self._then is not None:
            self._then(phase, collective)
        step = self._steps if self._step is None else self._step()
        begins = 0 if collective == begun else collective
        for number, fault in enumerate(self._faults):
            mark = number, step if fault.every else 0
            of_step = begins and begins - self._before_step
            if mark not in self._struck and fault.is_at(phase, self._nth, step, begins, of_step):
                self._struck.add(mark)
                self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        if not fault.after_s:
            _act(fault, self._parameters)
            return
        timer = threading.Timer(fault.after_s, _act, (fault, self._parameters))
        timer.daemon = True
        timer.start()


def _act(fault: Fault, parameters: Mapping[str, Tensor] | None) -> None:
    if fault.kind == "fail":
        raise InjectedFault(f"a fault on purpose: {fault.text}")
    if fault.kind in ("delay", "hang"):
        time.sleep(fault.lasts_s)
    elif fault.kind == "stop":
        if fault.lasts_s < FOR_EVER_S:
            _wake_later(fault.lasts_s)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.about == "parameter":
        assert parameters  # Plan.observer saw to it
        _flip(next(iter(parameters.values())) if fault.path is None else parameters[fault.path])
    else:
        _falsify_next(fault.about)


def _wake_later(seconds: float) -> None:
    """A process that is stopped cannot wake itself."""
    _alarms.append(subprocess.Popen(["sh", "-c", 'sleep "$0" && kill -CONT "$1"', str(seconds), str(os.getpid())]))


def _flip(parameter: Tensor) -> None:
    """Flip the lowest bit of the first element, behind autograd's back: no version counter tells of it."""
    import torch

    parameter.data.view(-1)[:1].view(torch.uint8)[0] ^= 1


def _falsify_next(about: str) -> None:
    """Put other numbers into this process's next round of integers, where it leaves for the other ranks."""
    import torch

    from shardrun.comm.agreement import Agreement
    from shardrun.comm.fingerprint import INTEGERS, integers

    honest = Agreement.add_up

    def lying(self: Agreement, vector: Tensor) -> list[int]:
        setattr(Agreement, "add_up", honest)  # noqa: B010
        if about == "vote":
            vector[INTEGERS] = 0
        else:
            vector[:INTEGERS] = torch.tensor(integers("a call that nobody makes"))
        return honest(self, vector)

    setattr(Agreement, "add_up", lying)  # noqa: B010
