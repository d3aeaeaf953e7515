"""Whether a failed world is worth a new one, and how that is announced.

[Note: restarts] torch's elastic agent could do this. It would have to be the parent, which then loads torch; it starts
again whatever went wrong, a refused config included; it returns 1 for everything, and its store listens on all
addresses. The launcher knows each rank's end, so it starts again itself, and only after what may pass.
"""

from __future__ import annotations

from pathlib import Path

from shardrun.run.failure import named
from shardrun.run.outcome import Outcome

# Of shardrun's own errors those that a lost connection or peer brings; the others are refusals, and will come again.
MAY_PASS = frozenset({"CommunicatorError", "StepFailed"})


def may_pass(outcome: Outcome) -> bool:
    """Whether the failure may not come again: a rank that was killed or left, a failed collective, the recipe's error.

    Not: a refusal of ours, a non-finite value, a stop, and a host that is gone, which nobody here can start again.
    """
    culprit = outcome.culprit
    if outcome.exit_code != 1 or culprit is None or any(end.lost for end in outcome.ends):
        return False
    return culprit.failure is None or not culprit.failure.expected or culprit.failure.type in MAY_PASS


def announcement(outcome: Outcome, number: int, most: int, last: Path | None) -> str:
    """One line: which restart, why, and from where it goes on."""
    cause = None if outcome.culprit is None else outcome.culprit.failure
    told = ""
    if cause is not None and cause.code is None:
        message = cause.message if cause.expected else named(cause)
        told = f": {(message.splitlines() or [cause.type])[0]}"
    going_on = f"going on from {last}" if last is not None else "no checkpoint yet, from the beginning"
    return f"restart {number} of {most}: {outcome.reason}{told}; {going_on}"
