"""What a failure in each phase of a step means, said once for every strategy."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shardrun.comm.communicator import Communicator
from shardrun.errors import CommunicatorError, ShardrunError, StepFailed

PHASES = ("collect", "agree", "reduce", "normalise", "decide", "propose", "gather", "vote", "commit")
_GRADIENTS_KEPT = frozenset(PHASES[:6])


@contextmanager
def transaction(comm: Communicator, step: int) -> Iterator[None]:
    """Run the phases of one step; the body announces each by `comm.enter(phase)`.

    What all ranks raise alike (a refusal) passes through: nothing has changed and the communicator is fine. A failed
    collective, or a local failure that the others cannot know of, closes the communicator and becomes StepFailed.
    """
    comm.require_open()
    try:
        yield
        comm.enter("idle")
    except CommunicatorError as error:
        if not comm.is_poisoned:
            raise  # a mismatch of calls, found before anything was sent
        raise _failed(comm, step, error) from error
    except ShardrunError:
        raise  # agreed by all ranks
    except BaseException as error:
        if comm.world_size > 1:  # the others wait for this rank: closing the connections frees them
            comm.poison(
                f"rank {comm.rank} failed in phase {comm.phase} of step {step}: {type(error).__name__}: {error}"
            )
        if not isinstance(error, Exception):
            raise
        raise _failed(comm, step, error) from error


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM from the vote to the end of the commit; they are delivered then.

    Handlers run in the main thread only, so elsewhere there is nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    handlers = {one: handler for one, handler in handlers.items() if callable(handler)}
    for one in handlers:
        signal.signal(one, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
        for number in dict.fromkeys(held):
            signal.raise_signal(number)


def _failed(comm: Communicator, step: int, error: Exception) -> StepFailed:
    in_doubt = comm.phase == "vote"
    state = (
        f"another rank may already be at step {step}; parameters and optimizer state here are those of step {step - 1}"
        if in_doubt
        else f"parameters and optimizer state are those of step {step - 1}"
    )
    return StepFailed(
        f"step {step} failed in phase {comm.phase}: {error}. {state[0].upper()}{state[1:]}",
        step=step,
        phase=comm.phase,
        gradients_kept=comm.phase in _GRADIENTS_KEPT,
        in_doubt=in_doubt,
    )
