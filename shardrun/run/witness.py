"""A worker's part in a proof: spoils what a restore must replace, and writes down what was seen and what there is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardrun.data.order import Window, windows_per_epoch
from shardrun.run.build import Built
from shardrun.run.probe import content_digest, micro_batch_samples, write_probe
from shardrun.run.progress import Progress
from shardrun.run.stops import Stops, plan_stops
from shardrun.run.tamper import check_tamper, scramble, tamper

PLAN = "plan.json"
SEEN = "seen"


class Onlooker:
    """Made by every rank of a leg of a proof: spoils everything before a restore, and notes the data that are seen.

    `asked`: `folder` (where to write), `scramble` (a seed; without it nothing is spoiled), `asks_again` (whether each
    micro-batch is fetched once more, because a data set that then gives something else cannot be resumed).
    """

    end: int | None = None
    """The window with which the run counts as finished, if not by its own length."""

    def __init__(self, built: Built, asked: Mapping[str, Any]) -> None:
        self._built = built
        self._folder = Path(asked["folder"])
        self._scramble = asked.get("scramble")
        self._asks_again = bool(asked.get("asks_again"))
        self._seen: list[dict[str, Any]] = []
        self._unread: set[str] = set()
        self._unsteady: list[dict[str, Any]] = []

    def before_restore(self) -> None:
        """Make everything wrong that the restore has to make right."""
        if self._scramble is not None:
            scramble(self._built, self._scramble)

    def after_restore(self, progress: Progress) -> None:
        """The run stands where it goes on; collective."""

    def saw(self, progress: Progress, window: Window, number: int, batch: Any) -> None:
        """Note which samples a micro-batch was said to hold, and what it did hold."""
        entry = {"step": progress.step + 1, "epoch": window.epoch, "micro_batch": number}
        samples = micro_batch_samples(self._built, window, number)
        digest = content_digest(batch, self._unread)
        self._seen.append({**entry, "samples": samples, "sha256": digest})
        if self._asks_again and content_digest(self._built.loader.fetch(window, number), self._unread) != digest:
            self._unsteady.append(entry)

    def after_window(self, progress: Progress, *, leaving: bool) -> None:
        """A window is done; `leaving`: it is the last one of this leg."""
        if leaving:
            path = self._folder / f"{SEEN}.rank-{self._built.comm.rank}.json"
            path.write_text(json.dumps(self.noted()))

    def noted(self) -> dict[str, Any]:
        """What was seen so far, as plain JSON."""
        return {"seen": self._seen, "unread": sorted(self._unread), "unsteady": self._unsteady}


class Witness(Onlooker):
    """The onlooker of a verification of a config, which also writes down what the live objects hold.

    `asked` is the job's option `verify`: besides the above `leg` (0: the straight one), `most` and `total` (for the
    plan, which the straight leg makes) or `plan` (as it was made), `tamper` (a name).
    """

    def __init__(self, built: Built, asked: Mapping[str, Any]) -> None:
        super().__init__(built, asked)
        self._leg = int(asked["leg"])
        self._tamper = None if asked.get("tamper") is None else check_tamper(asked["tamper"])
        if self._leg == 0:
            self._plan = _plan(built, asked.get("most"), asked.get("total"))
            if built.comm.rank == 0:
                (self._folder / PLAN).write_text(json.dumps(self._plan.to_json()))
        else:
            self._plan = Stops.from_json(asked["plan"])
        self.end = self._plan.end

    def after_restore(self, progress: Progress) -> None:
        """Write down what the restore gave; in a fresh leg, begin where the plan says."""
        if self._leg > 1:
            if self._tamper is not None:
                tamper(self._tamper, self._built, progress)
            self._write("restored", progress)
        else:
            progress.position = self._plan.first * self._built.config.train.global_batch_size

    def after_window(self, progress: Progress, *, leaving: bool) -> None:
        """Write down the state after a window: the straight leg at each stop, every leg when it ends."""
        if self._leg == 0 and (leaving or progress.step in self._plan.stops):
            self._write(f"step-{progress.step}", progress)
        elif leaving:
            self._write("left", progress)

    def _write(self, moment: str, progress: Progress) -> None:
        write_probe(self._folder, moment, self._built, progress, self.noted())


def onlooker(built: Built, options: Mapping[str, Any]) -> Onlooker | None:
    """The onlooker that a job's options ask for."""
    if "verify" in options:
        return Witness(built, options["verify"])
    return Onlooker(built, options["replay"]) if "replay" in options else None


def _plan(built: Built, most: int | None, total: int | None) -> Stops:
    train, loader = built.config.train, built.loader
    per_epoch = windows_per_epoch(loader.samples, train.global_batch_size, built.config.data.drop_last)
    if total is None:
        total = train.steps if train.epochs is None else train.epochs * per_epoch
    return plan_stops(total, per_epoch, most=most, one_epoch=train.epochs == 1)
