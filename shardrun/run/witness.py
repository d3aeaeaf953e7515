"""A worker's part in a verification: spoils what a restore must replace, and writes down what the live objects hold."""

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


class Witness:
    """Made by every rank of a leg of a verification; only `after_restore` communicates.

    `asked` is the job's option `verify`: `folder` (where to write), `leg` (0: the straight one), `most` and `total`
    (for the plan, which the straight leg makes) or `plan` (as it was made), `scramble` (a seed), `tamper` (a name).
    """

    def __init__(self, built: Built, asked: Mapping[str, Any]) -> None:
        self._built = built
        self._folder = Path(asked["folder"])
        self._leg = int(asked["leg"])
        self._scramble = asked.get("scramble")
        self._tamper = None if asked.get("tamper") is None else check_tamper(asked["tamper"])
        self._seen: list[dict[str, Any]] = []
        self._unread: set[str] = set()
        if self._leg == 0:
            self.plan = _plan(built, asked.get("most"), asked.get("total"))
            if built.comm.rank == 0:
                (self._folder / PLAN).write_text(json.dumps(self.plan.to_json()))
        else:
            self.plan = Stops.from_json(asked["plan"])

    @property
    def is_resumed(self) -> bool:
        """Whether this leg goes on with what another process saved."""
        return self._leg > 1

    def before_restore(self) -> None:
        """In a resumed leg: make everything wrong that the restore has to make right."""
        if self.is_resumed and self._scramble is not None:
            scramble(self._built, self._scramble)

    def after_restore(self, progress: Progress) -> None:
        """Write down what the restore gave; in a fresh leg, begin where the plan says."""
        if self.is_resumed:
            if self._tamper is not None:
                tamper(self._tamper, self._built, progress)
            self._write("restored", progress)
        else:
            progress.position = self.plan.first * self._built.config.train.global_batch_size

    def saw(self, progress: Progress, window: Window, number: int, batch: Any) -> None:
        """Note which samples a micro-batch was said to hold, and what it did hold."""
        self._seen.append(
            {
                "step": progress.step + 1,
                "epoch": window.epoch,
                "micro_batch": number,
                "samples": micro_batch_samples(self._built, window, number),
                "sha256": content_digest(batch, self._unread),
            }
        )

    def after_window(self, progress: Progress, *, leaving: bool) -> None:
        """Write down the state after a window: the straight leg at each stop, every leg when it ends."""
        if self._leg == 0 and (leaving or progress.step in self.plan.stops):
            self._write(f"step-{progress.step}", progress)
        elif leaving:
            self._write("left", progress)

    def _write(self, moment: str, progress: Progress) -> None:
        more = {"seen": self._seen, "unread": sorted(self._unread)}
        write_probe(self._folder, moment, self._built, progress, more)


def _plan(built: Built, most: int | None, total: int | None) -> Stops:
    train, loader = built.config.train, built.loader
    per_epoch = windows_per_epoch(loader.samples, train.global_batch_size, built.config.data.drop_last)
    if total is None:
        total = train.steps if train.epochs is None else train.epochs * per_epoch
    return plan_stops(total, per_epoch, most=most, one_epoch=train.epochs == 1)
