"""What a failure in each phase of a step means, said once for every strategy."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from shardrun.comm.communicator import Communicator
from shardrun.errors import CommunicatorError, ShardrunError, StepFailed

PHASES = ("collect", "agree", "reduce", "normalise", "decide", "propose", "gather", "vote", "commit")
_SIGNALS = tuple(map(int, signal.valid_signals()))


@contextmanager
def transaction(comm: Communicator, what: str, step: int, drop_gradients: Callable[[bool], bool]) -> Iterator[None]:
    """Run the phases of one step; the body announces each by `comm.enter(phase)`, and "idle" when it has committed.

    What all ranks raise alike (a refusal) passes through: nothing has changed and the communicator is fine. A failed
    collective, or a local failure that the others cannot know of, closes the communicator and becomes StepFailed.
    `what` names it ("step 3"). `drop_gradients` is called after a failure, with whether that was in gather or later:
    it drops the pending gradients that are lost, and tells whether there were any.
    """
    comm.require_open()
    try:
        yield
        comm.enter("idle")
    except BaseException as error:
        if comm.phase == "idle":
            raise  # the step is committed; this came after it
        if isinstance(error, ShardrunError) and error.agreed:
            raise
        if comm.world_size > 1 or comm.phase == "commit":
            # The others wait for this rank: closing the connections frees them.
            told = f"{type(error).__name__}: {error}"
            comm.poison(f"{comm.named(comm.rank)} failed in phase {comm.phase} of {what}: {told}")
        dropped = drop_gradients(PHASES.index(comm.phase) >= PHASES.index("gather"))
        if not isinstance(error, Exception):
            raise
        raise failed(comm, what, step, error, kept=not dropped) from error


def failed(comm: Communicator, what: str, step: int, error: Exception, *, kept: bool) -> StepFailed:
    """What is raised for `error` in the phase that `comm` is in; `kept`: whether the pending gradients are."""
    unchanged = f"parameters and optimizer state are those of step {step - 1}"
    others = f"the other ranks are at {what}; " if comm.world_size > 1 else ""
    state = {
        "vote": f"another rank may already be at {what}; here {unchanged}",
        "commit": f"{others}this rank is half way: its state must not be used or saved",
    }.get(comm.phase, unchanged)
    cause = str(error) if isinstance(error, CommunicatorError) else f"{type(error).__name__}: {error}"
    return StepFailed(
        f"{what} failed in phase {comm.phase}: {cause.rstrip('.')}. {state[0].upper()}{state[1:]}",
        step=step,
        phase=comm.phase,
        gradients_kept=kept,
        in_doubt=comm.phase in ("vote", "commit"),
        culprit=_culprit(comm, error),
    )


def _culprit(comm: Communicator, error: BaseException) -> int | None:
    world, failure = comm.parent or comm, comm.failure
    if failure is None or failure.kind == "failed":  # a world of one is not closed by a failure
        while error.__cause__ is not None:
            error = error.__cause__
        # Of shardrun's own errors here it is a vote that all ranks counted alike: nobody knows whose fault it was.
        return None if isinstance(error, CommunicatorError) else world.rank
    return failure.blamed(world.world_size)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Hold back every signal that Python code handles until the block is over; delivered then, none is lost.

    For what must not be left half way: from the vote to the end of the commit, and while state is replaced.

    Handlers run in the main thread only, so elsewhere there is nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    holding = True

    def hold(number: int, frame: FrameType | None) -> None:
        if holding:
            held.append(number)
        else:  # a handler that raised while they were put back has left this one in the place of others
            handlers[number](number, frame)

    handlers = {one: handler for one in _SIGNALS if callable(handler := signal.getsignal(one))}
    try:
        for one in handlers:
            signal.signal(one, hold)
        yield
    finally:
        holding = False
        try:
            for one, handler in handlers.items():
                signal.signal(one, handler)
        finally:
            _deliver(list(dict.fromkeys(held)))


def _deliver(numbers: list[int]) -> None:
    """Raise each signal; a handler that raises does not keep the later ones from theirs."""
    if numbers:
        try:
            signal.raise_signal(numbers[0])
        finally:
            _deliver(numbers[1:])
