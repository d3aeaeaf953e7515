"""What the measurements of all rounds come to: a row for each contender, and whether it counts. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from shardrun.bench.contenders import COMPUTE, SHARDRUN, WHAT, how_to_install
from shardrun.bench.rounds import Measured, Rounds, reference_of

LOSS_TOLERANCE = 1e-3
"""Relative, of the mean loss of every window."""
DISTANCE_TOLERANCE = 0.05
"""Of the trained parameters: L2 distance, relative to how far the reference has come from the start."""


@dataclass(frozen=True)
class Row:
    """One contender. Times are those of the slowest rank, bytes those of the worst one."""

    name: str
    what: str
    status: str
    """floor, reference, valid, void, not compared (there is nobody else), or not installed."""
    why: str | None = None
    configuration: str | None = None
    step_s: dict[str, float] | None = None
    """median, min and max over all timed windows of all rounds."""
    ratio: float | None = None
    """To `compute`: the median over the rounds of the ratio of both medians in the same round."""
    beyond_compute_s: float | None = None
    """The same of their difference."""
    shardrun_ratio: float | None = None
    """Of shardrun's steps to this one's, in the same way."""
    tokens_per_s: float | None = None
    peak_bytes: int | None = None
    gradient_bytes: int | None = None
    state_bytes: int | None = None
    first_window_s: float | None = None
    """From the start of the processes to the end of the first window, median over the rounds."""
    loss_difference: float | None = None
    distance: float | None = None
    rounds_s: list[list[float]] | None = None
    """Every timed window, round by round."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


def rows(names: Sequence[str], found: Rounds) -> list[Row]:
    """A row for each of `names`, in that order."""
    return [
        _row(name, found, reference_of(names))
        if name in found
        else Row(name, WHAT[name], "not installed", f"not installed; {how_to_install(name)}")
        for name in names
    ]


def _row(name: str, found: Rounds, reference: str | None) -> Row:
    rounds, own = found[name], _medians(found[name])
    steps = [seconds for one in rounds for seconds in one.steps_s]
    status, why, loss, apart = "floor", None, None, None
    if name != COMPUTE:
        status, why, loss, apart = _verdict(rounds, None if reference is None else found[reference])
    floor = list(zip(own, _medians(found[COMPUTE]), strict=True))
    return Row(
        name,
        WHAT[name],
        status,
        why,
        configuration=rounds[0].ranks[0]["configuration"],
        step_s={"median": median(steps), "min": min(steps), "max": max(steps)},
        ratio=median(seconds / under for seconds, under in floor),
        beyond_compute_s=median(seconds - under for seconds, under in floor),
        shardrun_ratio=median(ours / other for ours, other in zip(_medians(found[SHARDRUN]), own, strict=True)),
        tokens_per_s=median(rounds[0].weights) / median(steps),
        peak_bytes=max(one.worst("peak_bytes") for one in rounds),
        gradient_bytes=rounds[0].worst("gradient_bytes"),
        state_bytes=rounds[0].worst("state_bytes"),
        first_window_s=median(one.worst("first_window_s") for one in rounds),
        loss_difference=loss,
        distance=apart,
        rounds_s=[one.steps_s for one in rounds],
    )


def _medians(rounds: Sequence[Measured]) -> list[float]:
    return [median(one.steps_s) for one in rounds]


def _verdict(
    rounds: Sequence[Measured], reference: Sequence[Measured] | None
) -> tuple[str, str | None, float | None, float | None]:
    """Status, why it is void, and how far losses and parameters are from those of the reference."""
    if reference is None or rounds is reference:
        return "not compared" if reference is None else "reference", None, None, None
    expected = reference[0].losses
    differences = [
        abs(own - other) / max(abs(other), 1e-12)
        for one in rounds
        for own, other in zip(one.losses, expected, strict=True)
    ]
    loss = math.nan if any(map(math.isnan, differences)) else max(differences)  # max alone may pass over a NaN
    apart = float(rounds[0].ranks[0]["distance"])
    wrong = []
    if not loss <= LOSS_TOLERANCE:
        wrong.append(f"a loss differs by {loss:.2g} (tolerance {LOSS_TOLERANCE:g})")
    if not apart <= DISTANCE_TOLERANCE:
        wrong.append(f"the parameters differ by {apart:.2g} of their way (tolerance {DISTANCE_TOLERANCE:g})")
    return ("void", "; ".join(wrong), loss, apart) if wrong else ("valid", None, loss, apart)
