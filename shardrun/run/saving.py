"""How a training saves: in the foreground, or begun at the end of one window and published at that of a later one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrun.checkpoint.commit import PendingSave, Saved, begin_save, save
from shardrun.checkpoint.store import CHECKPOINTS
from shardrun.run.build import Built
from shardrun.run.exports import write_export
from shardrun.run.journal import Journal
from shardrun.run.progress import Progress
from shardrun.run.replicas import compare_replicas, parameter_digests
from shardrun.run.state import Lineage, snapshot_aside, snapshot_of


@dataclass
class Saving:
    """The checkpoints of one start of a run. Every rank has one; what is not said to be local is collective.

    At most one save is under way in the background: the next one waits for it.
    """

    built: Built
    run_dir: Path
    lineage: Lineage
    journal: Journal
    total_steps: int | None
    saved_step: int
    """The step of the newest checkpoint, published or under way."""
    _pending: PendingSave | None = None
    _first: bool = True

    @property
    def under_way(self) -> bool:
        """Whether a save is under way in the background; the same on all ranks."""
        return self._pending is not None

    @property
    def is_waiting(self) -> bool:
        """Whether a save is under way and this rank has done its own part of the stage; local."""
        return self._pending is not None and self._pending.is_waiting

    @property
    def has_begun(self) -> bool:
        """Whether the run's own folder has a checkpoint, or is about to: a branch from elsewhere has none at first."""
        parent, folder = self.lineage.parent, self.run_dir / CHECKPOINTS
        return self.under_way or (parent is not None and parent.resolve().parent == folder.resolve())

    def save(self, progress: Progress, *, wait: bool) -> None:
        """Save this step, unless that was done; with `wait` it is durable when this returns, whatever the config says.

        DivergenceError where the parameters are not the same on all ranks, CheckpointError as `commit.save`: also the
        one of the save before, if that was under way.
        """
        with self._phase():
            if wait or self.saved_step != progress.step:
                self._settle()
            if self.saved_step != progress.step:
                self._save(progress, wait)

    def hold(self) -> None:
        """Return once the live state may change: called before each update; local."""
        if self._pending is not None:
            self._pending.hold()

    def advance(self) -> None:
        """Go on with the save that is under way; for when every rank `is_waiting`."""
        with self._phase():
            self._advance()

    def settle(self) -> None:
        """Wait until the save that is under way, if there is one, is published."""
        if self.under_way:
            with self._phase():
                self._settle()

    @contextmanager
    def _phase(self) -> Iterator[None]:
        comm = self.built.comm
        comm.enter("save")
        with comm.timeout(self.built.config.topology.save_timeout_s):
            yield
        comm.enter("between steps")

    def _settle(self) -> None:
        while self._pending is not None:
            self._advance()

    def _advance(self) -> None:
        assert self._pending is not None
        pending, self._pending = self._pending, None  # one that failed is over
        saved = pending.advance()
        if saved is None:
            self._pending = pending
        else:
            self._published(saved)

    def _save(self, progress: Progress, wait: bool) -> None:
        built, lineage, asked = self.built, self.lineage, self.built.config.checkpoint
        prevented = f"step {progress.step} is not saved"
        compared = compare_replicas(built.comm, built.model, built.spread, prevented, in_parts=built.in_parts)
        self.saved_step = progress.step
        keeps: dict[str, Any] = {"keep": asked.keep, "keep_every": asked.keep_every, "fence": lineage.fence}
        if self._in_background and not wait:
            # In a world of one nothing was compared; the copy is made while the recipe runs, and has to be the same.
            compared = compared or parameter_digests(built.model)
            take = snapshot_aside(built, progress, lineage, compared)
            self._pending = begin_save(self.run_dir, built.comm, take, **keeps)
        else:
            self._published(save(self.run_dir, built.comm, snapshot_of(built, progress, lineage, compared), **keeps))

    @property
    def _in_background(self) -> bool:
        if not self.built.config.checkpoint.background or self.built.recipe.on_save is None:
            return self.built.config.checkpoint.background
        self.journal.note("checkpoint.async has no effect: on_save of the recipe is given the model as it was saved")
        return False

    def _published(self, saved: Saved) -> None:
        built = self.built
        self.lineage.parent = saved.path
        if built.recipe.on_save is not None:
            if built.comm.rank == 0:
                write_export(self.run_dir, saved.path.name, built.recipe.on_save, built.model)
            built.comm.compare("export written", "")  # waited for as long as for the save that it is part of
        self.journal.saved(saved, most=self._most() if self._first else None)
        self._first = False

    def _most(self) -> int | None:
        """How many checkpoints may stand at one time, the one that is being written included; None: no end is known."""
        asked = self.built.config.checkpoint
        if asked.keep_every is None:
            return asked.keep + 1
        return None if self.total_steps is None else asked.keep + 1 + self.total_steps // asked.keep_every
