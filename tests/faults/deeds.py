"""What may happen to a run of two ranks in one cycle of chaos: by `--fault` or from outside, at a random moment."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from shardrun.comm.fault_text import STEP_PHASES
from tests.support.launching import Program

WORLD = 2
SAVES_EVERY = 3
SHORT_S = 5.0
_AHEAD = 6  # updates beyond the last checkpoint among which things happen


@dataclass(frozen=True)
class Deed:
    """What happens in one cycle. `act` does it from outside; `codes` are those that the command may end with."""

    codes: frozenset[int]
    words: tuple[str, ...] = ()
    act: Callable[[Program], None] | None = None


class Moment:
    """The random choices of one cycle."""

    def __init__(self, seed: str, last: int) -> None:
        self.rng = random.Random(seed)
        self.step = last + self.rng.randint(1, _AHEAD)

    def rank(self) -> int:
        """Any rank."""
        return self.rng.randrange(WORLD)

    def place(self, phases: Sequence[str]) -> str:
        """A phase of the step, or a collective in it."""
        phase = self.rng.choice(phases)
        if phase == "save":
            step = -(-self.step // SAVES_EVERY) * SAVES_EVERY
            return f"save:{self.rng.randint(1, 12)} of step {step}"
        within = phase in ("agree", "reduce", "decide", "gather", "vote") and self.rng.random() < 0.5
        return f"{phase}{':1' if within else ''} of step {self.step}"

    def come(self, program: Program) -> None:
        """Wait for a random moment: in the start, or around the end of an update."""
        if self.rng.random() < 0.25:
            _wait(program, lambda: False, self.rng.uniform(0.2, 4.0))  # before that, it is Python's own start
        else:
            shown = f"step {self.step}/"
            _wait(program, lambda: shown in program.stdout, 60.0)
            time.sleep(self.rng.uniform(0.0, 0.1))


def _wait(program: Program, condition: Callable[[], bool], most_s: float) -> None:
    end = time.monotonic() + most_s
    while program.process.poll() is None and not condition() and time.monotonic() < end:
        time.sleep(0.003)


def _send(program: Program, rank: int | None, *numbers: int, apart_s: float = 0.3) -> None:
    """Signals to a rank, or to the command itself; one that is gone gets none."""
    pid = program.process.pid if rank is None else program.ranks().get(rank)
    for place, number in enumerate(numbers):
        if place:
            time.sleep(apart_s)
        if pid is not None and program.process.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


# ---- what may happen -------------------------------------------------------------------------------------------------

_ANY = ("data", "forward", "backward", *STEP_PHASES, "save")
_RAISING = tuple(phase for phase in _ANY if phase not in ("commit", "idle"))
_FAILED = frozenset({0, 1})  # 0: the run was over before it could happen
_STOPPED = frozenset({0, 75, 130})  # 130: before the workers could listen


def _kill_a_rank(at: Moment) -> Deed:
    def act(program: Program) -> None:
        at.come(program)
        _send(program, at.rank(), signal.SIGKILL)

    return Deed(_FAILED, act=act)


def _kill_a_rank_at_a_place(at: Moment) -> Deed:
    return Deed(_FAILED, ("--fault", f"kill rank {at.rank()} at {at.place(_ANY)}"))


def _kill_the_command(at: Moment) -> Deed:
    def act(program: Program) -> None:
        at.come(program)
        _send(program, None, signal.SIGKILL)

    return Deed(frozenset({0, -signal.SIGKILL}), act=act)


def _stop_and_wake_a_rank(at: Moment) -> Deed:
    """Below the timeout, so nothing comes of it; then a SIGTERM ends the cycle."""

    def act(program: Program) -> None:
        at.come(program)
        _send(program, at.rank(), signal.SIGSTOP, signal.SIGCONT, apart_s=at.rng.uniform(0.05, 0.8))
        time.sleep(at.rng.uniform(0.0, 0.2))
        _send(program, None, signal.SIGTERM)

    return Deed(_STOPPED, act=act)


def _stop_a_rank_for_long(at: Moment) -> Deed:
    fault = f"stop rank {at.rank()} for {1.5 * SHORT_S} s at {at.place(_ANY)}"
    return Deed(_FAILED, ("--fault", fault, f"topology.timeout_s={SHORT_S}", f"topology.save_timeout_s={SHORT_S}"))


def _hang(at: Moment) -> Deed:
    fault = f"hang rank {at.rank()} at {at.place(_ANY)}"
    return Deed(_FAILED, ("--fault", fault, f"topology.timeout_s={SHORT_S}", f"topology.save_timeout_s={SHORT_S}"))


def _raise(at: Moment) -> Deed:
    return Deed(_FAILED, ("--fault", f"fail rank {at.rank()} at {at.place(_RAISING)}"))


def _lie(at: Moment) -> Deed:
    """A lie about the vote or a fingerprint refuses the step; a changed parameter is found before it is spread."""
    about, phases = at.rng.choice(
        [
            ("vote", ("vote",)),
            ("fingerprint", ("agree", "save")),
            ("parameter", ("data", "forward", "backward", "save")),
        ]
    )
    return Deed(
        _FAILED, ("--fault", f"lie rank {at.rank()} about {about} at {at.rng.choice(phases)} of step {at.step}")
    )


def _delay_and_stop(at: Moment) -> Deed:
    def act(program: Program) -> None:
        at.come(program)
        _send(program, None, at.rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]))

    fault = f"delay rank {at.rank()} by {at.rng.uniform(0.05, 0.5):.3f} s at {at.place(_ANY)}"
    return Deed(_STOPPED, ("--fault", fault), act)


def _interrupt_twice(at: Moment) -> Deed:
    def act(program: Program) -> None:
        at.come(program)
        _send(program, None, signal.SIGINT, signal.SIGINT, apart_s=at.rng.uniform(0.12, 0.3))

    return Deed(_STOPPED, act=act)


DEEDS: dict[str, tuple[int, Callable[[Moment], Deed]]] = {
    "SIGKILL of a rank at any moment": (5, _kill_a_rank),
    "SIGKILL of a rank at a place in a step": (5, _kill_a_rank_at_a_place),
    "SIGKILL of the command": (3, _kill_the_command),
    "SIGSTOP and SIGCONT of a rank, then SIGTERM": (2, _stop_and_wake_a_rank),
    "SIGSTOP of a rank beyond the timeout": (1, _stop_a_rank_for_long),
    "a rank that hangs": (1, _hang),
    "an exception": (3, _raise),
    "a lie about vote, call or parameter": (2, _lie),
    "a delay, then a request to stop": (2, _delay_and_stop),
    "two Ctrl-C": (1, _interrupt_twice),
}
"""What may happen, and how often against the others."""
