"""shardrun's own row: the trainer of `shardrun train`, log and all, with a stopwatch beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardrun.bench.measure import Stopwatch
from shardrun.comm.communicator import Communicator
from shardrun.config.schema import Config
from shardrun.errors import UsageError
from shardrun.run.build import Built, build
from shardrun.run.journal import Journal
from shardrun.run.metrics import MetricsFile
from shardrun.run.model import distinct_parameters
from shardrun.run.progress import Progress
from shardrun.run.state import Lineage
from shardrun.run.tether import Tether
from shardrun.run.trainer import Plan, Trainer


class Windows(Journal):
    """A journal that besides tells somebody of every window as it ends."""

    def __init__(self, tether: Tether, metrics: MetricsFile | None, ended: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__(tether, metrics)
        self._ended = ended

    def window(
        self, row: Mapping[str, Any], seconds: float, device: torch.device, *, shown: bool, total_steps: int | None
    ) -> None:
        """A window is done and written down."""
        super().window(row, seconds, device, shown=shown, total_steps=total_steps)
        self._ended(row)


class Trained:
    """The trainer over everything that `build` makes of the config; it logs into `folder`."""

    def __init__(self, config: Config, comm: Communicator, tether: Tether, folder: Path) -> None:
        self.built: Built = build(config, comm)
        self._tether = tether
        self._folder = folder

    @property
    def configuration(self) -> str:
        """How it is set up."""
        strategies = {group.sharded.strategy for group in self.built.groups}
        travel = f"seam {self.built.comm.seam}, {self.built.comm.transport}"
        return f"strategy {', '.join(sorted(strategies))}; fail-closed step; {travel}"

    def run(self, count: int, stopwatch: Stopwatch) -> list[tuple[float, int]]:
        """Train `count` windows; mean loss and weight of each. Collective."""
        losses: list[tuple[float, int]] = []

        def ended(row: Mapping[str, Any]) -> None:
            stopwatch.mark()
            losses.append((math.nan if row["loss"] is None else row["loss"], row["tokens"]))

        self.train(count, ended)
        if len(losses) < count:
            raise UsageError(
                f"the run of the config ends after {len(losses)} windows, and {count} are to be trained; give fewer "
                "--steps, or more epochs or tokens"
            )
        return losses

    def train(self, count: int, ended: Callable[[Mapping[str, Any]], None]) -> None:
        """Train `count` windows; `ended` is told of each. Collective."""
        comm, status = self.built.comm, self._tether.status
        metrics = MetricsFile(self._folder, 0, later=False) if comm.rank == 0 else None
        journal = Windows(self._tether, metrics, ended)
        plan, lineage = Plan(self._folder, end_at=count, saves=False), Lineage("bench", "bench", None, None)
        trainer = Trainer(self.built, self._tether, plan, Progress(), lineage, journal)
        comm.observer = lambda phase, collective: status.set(trainer.current_step, phase, collective)
        trainer.run()
        journal.close()

    @property
    def gradient_bytes(self) -> int:
        """Pending gradients and reduced slices."""
        return sum(sum(group.sharded.gradient_nbytes.values()) for group in self.built.groups)

    @property
    def state_bytes(self) -> int:
        """Optimizer state of this rank."""
        return sum(group.sharded.state_nbytes for group in self.built.groups)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The trained parameters, which every rank has whole; local."""
        for path, parameter in distinct_parameters(self.built.model).items():
            if parameter.requires_grad:
                yield path, parameter.detach()
