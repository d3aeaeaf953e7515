"""One family of errors. Each says what is wrong with both values, where, and what to do; each knows its exit code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar


class ShardrunError(Exception):
    """Base of everything shardrun raises on purpose. `exit_code` is what the command line returns for it."""

    exit_code = 1
    agreed = False
    """Whether every rank of the group raised it alike, so that none waits for another."""


_E = TypeVar("_E", bound=ShardrunError)


def by_all(error: _E) -> _E:
    """`error`, marked as one that every rank raises at this point."""
    error.agreed = True
    return error


class UsageError(ShardrunError, ValueError):
    """A call or a command line that cannot be meant."""

    exit_code = 2


class ConfigError(UsageError):
    """A config that does not hold; `problems` has every problem found, one line each."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class SelectionError(UsageError):
    """A selection that matches nothing, names a path twice, or covers something that cannot be selected."""


class ContractError(UsageError):
    """The ranks of a group hold different selected parameters, or a parameter changed after set-up."""


class CheckpointError(ShardrunError, ValueError):
    """A checkpoint is missing, damaged or does not fit this run."""

    exit_code = 3


class VerificationError(ShardrunError):
    """verify-resume found a difference."""

    exit_code = 4


class LaunchError(ShardrunError):
    """The environment does not allow the run: ports, devices, processes, folders."""

    exit_code = 5


class StepRefused(ShardrunError, ValueError):
    """Every rank refused the step before a change: parameters, state and pending gradients are as before."""


class NonFiniteError(StepRefused):
    """A reduced gradient is NaN or infinite. Parameters and state are those of the previous step."""

    exit_code = 6


class EmptyWindowError(StepRefused):
    """The global weight of a mean-mode step is zero."""


class CommunicatorError(ShardrunError, RuntimeError):
    """A collective failed, or the communicator was poisoned by an earlier failure."""


class CallMismatch(CommunicatorError, ValueError):
    """The ranks of a group called different operations. Nothing was sent."""


class StepFailed(ShardrunError, RuntimeError):
    """A step failed underway. No parameter and no optimizer state has changed on this rank, unless `phase` is "commit".

    `culprit` is the rank of the world that failed by a fault of its own, or the only one that is missing; None if that
    is not known. `gradients_kept` tells whether the pending gradients are still bit-identical; else they were dropped.
    `in_doubt` is True when the failure fell inside the final vote, so that another rank may be one whole step ahead, or
    into the commit after it, which nothing but a fault of the machine should do: then this rank's state is torn, and
    the session refuses to step or to give a record.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int,
        phase: str,
        gradients_kept: bool,
        in_doubt: bool = False,
        culprit: int | None = None,
    ) -> None:
        super().__init__(message)
        self.step = step
        self.phase = phase
        self.gradients_kept = gradients_kept
        self.in_doubt = in_doubt
        self.culprit = culprit


class DivergenceError(ShardrunError):
    """Parameters that all ranks should hold alike are not the same on all of them; the last checkpoint is good."""


class StoppedAfterSave(ShardrunError):
    """Stopped on request after a checkpoint was published; running the same command again goes on."""

    exit_code = 75


class Interrupted(ShardrunError):
    """Stopped at once on a second request; nothing was saved."""

    exit_code = 130
