"""Prove a resume: run straight and interrupted in scratch folders, compare what the live objects held. No torch here.

[Note: what is compared] The straight leg never saves. The interrupted history is stopped twice; each of its legs is a
fresh set of processes that knows only the folder, and in which everything was spoiled before the restore. Three moments
of each stop are held against each other: the straight run at that step, the interrupted one as it left, the next leg
as it was restored; then both ends. A run that differs from itself before its first stop is told apart from a resume
that lost something.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrun.checkpoint.store import newest
from shardrun.config.schema import Config
from shardrun.errors import StoppedAfterSave, VerificationError
from shardrun.run.comparison import Comparison, Difference, Moment, Row
from shardrun.run.launch import Screen, launch
from shardrun.run.legs import LegFailed, Legs, Start
from shardrun.run.metrics import NAME, read_rows
from shardrun.run.stops import DEFAULT_WINDOWS, Stops

_PLAN = "plan.json"
SCRAMBLE = 20261
"""Seed of the noise that everything is overwritten with before a restore."""

STOPPED, RESTORED, ENDED = "before the stop", "after the restore", "at the end"


@dataclass(frozen=True)
class Verdict:
    """What came out. `stopped_early`: legs after the first difference were not run."""

    plan: Stops
    world_size: int
    rows: list[Row]
    first: Difference | None
    hints: list[str]
    stopped_early: bool
    unsteady: str | None = None
    """Where the data set gave something else when it was asked again for the same samples."""

    @property
    def exit_code(self) -> int:
        """0, or that of VerificationError."""
        return 0 if self.first is None else VerificationError.exit_code

    @property
    def values(self) -> int:
        """How many values were compared."""
        return sum(row.values for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "verdict": "bit-identical" if self.first is None else "different",
            "world_size": self.world_size,
            "plan": self.plan.to_json(),
            "compared": [
                {"what": row.what, "values": row.values, "first_difference": row.first and row.first.to_json()}
                for row in self.rows
            ],
            "first_difference": self.first and self.first.to_json(),
            "hints": self.hints,
            "stopped_early": self.stopped_early,
        }


class Verification:
    """One verification in the folder `scratch`, which has to be empty.

    `most`: windows that are run at most (None: the whole run). `tamper`: what is changed after each restore, as a
    control that must be found. `say` gets a line after each leg; `start` runs a leg's processes to their end.
    """

    def __init__(
        self,
        settings: Config,
        scratch: Path,
        screen: Screen,
        *,
        most: int | None = DEFAULT_WINDOWS,
        tamper: str | None = None,
        say: Callable[[str], None] = lambda text: None,
        start: Start = launch,
    ) -> None:
        self._settings = settings
        self._scratch = scratch
        self._legs = Legs(screen, start)
        self._most = most
        self._tamper = tamper
        self._say = say
        self._straight = scratch / "straight"
        self._interrupted = scratch / "interrupted"
        self.comparison = Comparison(settings.topology.world_size)

    def run(self) -> Verdict:
        """All legs, up to the first difference. Raises LegFailed, or Interrupted if somebody stopped it."""
        plan = self.straight()
        legs = range(1, len(plan.stops) + 2)
        for leg in legs:
            self.leg(plan, leg)
            if self.differs:
                break
        return self.verdict(plan, stopped_early=self.differs and leg != legs[-1])

    @property
    def differs(self) -> bool:
        """Whether a difference was found."""
        return self.comparison.first is not None

    def verdict(self, plan: Stops, *, stopped_early: bool = False) -> Verdict:
        """What the comparisons so far have come to."""
        found = self.comparison
        return Verdict(plan, found.world_size, found.rows, found.first, found.hints, stopped_early, found.unsteady)

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest one of the interrupted history."""
        found = newest(self._interrupted)
        return None if found is None else found.path

    # ---- legs ------------------------------------------------------------------------------------------------------

    def straight(self) -> Stops:
        """The leg that never stops and never saves; returns the plan that it made, by which the others go."""
        most = self._most
        if self._settings.train.tokens is not None:
            most = most or DEFAULT_WINDOWS  # its length shows only when it is over
        began, asked = time.monotonic(), {"leg": 0, "most": most, "tamper": self._tamper}
        self._launch("straight", self._straight, {"saves": False}, asked, 0)
        plan = self._read_plan()
        rows = read_rows(self._straight / NAME)
        ended = max((int(row["step"]) for row in rows), default=0)
        if ended != plan.end:
            self._straight = self._scratch / "straight-again"
            self._launch("straight", self._straight, {"saves": False}, {**asked, "total": ended}, 0)
            plan = self._read_plan()
        self._say(f"straight: {plan.end} windows without a stop, nothing saved ({time.monotonic() - began:.1f} s)")
        return plan

    def leg(self, plan: Stops, number: int) -> None:
        """Leg `number` (1, 2, ...) of the interrupted history, compared as far as it came."""
        begins, ends = (0, *plan.stops)[number - 1], (*plan.stops, plan.end)[number - 1]
        last = number > len(plan.stops)
        began, probes = time.monotonic(), self._interrupted / f"probes-{number}"
        asked: dict[str, Any] = {"leg": number, "plan": plan.to_json(), "tamper": self._tamper}
        if number > 1:  # it is resumed
            asked |= {"scramble": SCRAMBLE + number, "asks_again": True}
        options = {} if last else {"stop_at": ends}
        failed = None
        try:
            self._launch(f"leg {number}", self._interrupted, options, asked, 0 if last else StoppedAfterSave.exit_code)
        except LegFailed as error:
            failed = error
        if number > 1:
            self._compare(Moment(RESTORED, begins, begins, self._straight_at(begins), probes / "restored"), failed)
        if failed is not None:
            if self.comparison.first is None:
                raise failed
            self._say(f"leg {number}: {failed.outcome.reason}")
            return
        when = ENDED if last else STOPPED
        self._compare(Moment(when, begins, ends, self._straight_at(ends), probes / "left"), None)
        self._compare_metrics(when, ends)
        self._say(_leg_line(plan, number, begins, ends, time.monotonic() - began))

    def _compare(self, moment: Moment, failed: LegFailed | None) -> None:
        ranks = range(self.comparison.world_size)
        paths = [moment.interrupted.with_name(f"{moment.interrupted.name}.rank-{rank}.json") for rank in ranks]
        if failed is None or all(path.exists() for path in paths):
            self.comparison.compare(moment)
            if self.comparison.first is None:  # as large as the model and its state: no longer needed
                for path in paths:
                    path.with_suffix(".safetensors").unlink()

    def _compare_metrics(self, when: str, step: int) -> None:
        straight, interrupted = (read_rows(folder / NAME) for folder in (self._straight, self._interrupted))
        self.comparison.compare_metrics(when, [row for row in straight if row["step"] <= step], interrupted)

    def _straight_at(self, step: int) -> Path:
        return self._straight / "probes-0" / f"step-{step}"

    def _read_plan(self) -> Stops:
        return Stops.from_json(json.loads((self._straight / "probes-0" / _PLAN).read_text()))

    def _launch(
        self,
        name: str,
        run_dir: Path,
        options: Mapping[str, Any],
        asked: Mapping[str, Any],
        expected: int,
        settings: Config | None = None,
    ) -> None:
        probes = run_dir / f"probes-{asked['leg']}"
        probes.mkdir(parents=True)
        told = {**options, "verify": {**asked, "folder": str(probes)}}
        self._legs.run(name, settings or self._settings, run_dir, told, {expected})


def _leg_line(plan: Stops, number: int, begins: int, ends: int, seconds: float) -> str:
    start = "from the beginning" if number == 1 else f"fresh processes, all spoiled, then restored at {begins}"
    if number > len(plan.stops):
        return f"leg {number}: {start}; ended after window {ends} ({seconds:.1f} s)"
    place = f"inside epoch {plan.epoch(ends)}" if plan.inside(ends) else f"where epoch {plan.epoch(ends)} begins"
    return f"leg {number}: {start}; stopped after window {ends}, {place} ({seconds:.1f} s)"
