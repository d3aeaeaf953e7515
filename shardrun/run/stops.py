"""Where a verification begins, stops and ends, in windows. Pure integers: the worker plans, the parent reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from shardrun.errors import UsageError

DEFAULT_WINDOWS = 18
"""Windows that are run unless the command line gives a length: enough for three legs, an epoch's end and validation."""

_LEAST = 3


@dataclass(frozen=True)
class Stops:
    """`end` windows are run; the interrupted history is stopped after each of `stops` of them.

    The run begins with window `first` of the first epoch, so that the end of an epoch falls between the stops even
    where an epoch is long.
    """

    end: int
    stops: tuple[int, ...]
    first: int
    windows_per_epoch: int
    total: int | None
    """Windows of the whole run, if that is known beforehand."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(**{**document, "stops": tuple(document["stops"])})

    def epoch(self, stop: int) -> int:
        """The epoch, counted from 1, of the window that comes after `stop` windows."""
        return (self.first + stop) // self.windows_per_epoch + 1

    def inside(self, stop: int) -> bool:
        """Whether `stop` falls strictly inside an epoch."""
        return (self.first + stop) % self.windows_per_epoch != 0


def plan_stops(total: int | None, windows_per_epoch: int, *, most: int | None, one_epoch: bool = False) -> Stops:
    """Two stops, near a third and two thirds of the run; the second inside a later epoch if there is any way to it.

    `total`: windows of the whole run, `most`: how many of them to run at most (one of the two must be known);
    `one_epoch`: the run ends with its first epoch. UsageError if there is no room for two stops.
    """
    known = [count for count in (total, most) if count is not None]
    end = min(known)
    if end < _LEAST:
        raise UsageError(
            f"a run of {end} window{'s' * (end != 1)} has no room for two stops; "
            f"verify-resume needs at least {_LEAST} (train.steps=6, for example)"
        )
    from_start = _choose(end, windows_per_epoch, 0, total)
    if one_epoch or _is_inside_later(from_start):
        return from_start
    # The epoch's end is brought into the middle of what is run.
    shifted = _choose(end, windows_per_epoch, max(0, windows_per_epoch - end // 2), total)
    return shifted if _is_inside_later(shifted) else from_start


def _is_inside_later(plan: Stops) -> bool:
    return plan.inside(plan.stops[1]) and plan.epoch(plan.stops[1]) > 1


def _choose(end: int, windows_per_epoch: int, first: int, total: int | None) -> Stops:
    plan = Stops(end, (), first, windows_per_epoch, total)

    def second_cost(stop: int) -> tuple[bool, bool, int]:
        return not (plan.inside(stop) and plan.epoch(stop) > 1), not plan.inside(stop), abs(3 * stop - 2 * end)

    def first_cost(stop: int) -> tuple[bool, int]:
        return not plan.inside(stop), abs(3 * stop - end)

    second = min(range(2, end), key=second_cost)
    return Stops(end, (min(range(1, second), key=first_cost), second), first, windows_per_epoch, total)
