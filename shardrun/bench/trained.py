"""shardrun's own row: the trainer of `shardrun train`, with a stopwatch in place of its log."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardrun.bench.measure import Stopwatch
from shardrun.comm.communicator import Communicator
from shardrun.config.schema import Config
from shardrun.run.build import Built, build
from shardrun.run.journal import Journal
from shardrun.run.model import distinct_parameters
from shardrun.run.progress import Progress
from shardrun.run.state import Lineage
from shardrun.run.tether import Tether
from shardrun.run.trainer import Plan, Trainer


class Windows(Journal):
    """A journal that writes nothing, and is told of every window as it ends."""

    def __init__(self, tether: Tether, ended: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__(tether)
        self._ended = ended

    def window(
        self, row: Mapping[str, Any], seconds: float, device: torch.device, *, shown: bool, total_steps: int | None
    ) -> None:
        """The end of a window."""
        self._ended(row)


class Trained:
    """The trainer over everything that `build` makes of the config."""

    def __init__(self, config: Config, comm: Communicator, tether: Tether) -> None:
        self.built: Built = build(config, comm)
        self._tether = tether

    @property
    def configuration(self) -> str:
        """How it is set up."""
        (group,) = self.built.groups
        return f"strategy {group.sharded.strategy}, fail-closed step, seam {self.built.comm.seam}"

    def run(self, count: int, stopwatch: Stopwatch) -> list[tuple[float, int]]:
        """Train `count` windows; mean loss and weight of each. Collective."""
        losses: list[tuple[float, int]] = []

        def ended(row: Mapping[str, Any]) -> None:
            stopwatch.mark()
            losses.append((math.nan if row["loss"] is None else row["loss"], row["tokens"]))
            self._tether.status.set(row["step"] + 1, "window", 0)

        self.train(count, ended)
        return losses

    def train(self, count: int, ended: Callable[[Mapping[str, Any]], None]) -> None:
        """Train `count` windows; `ended` is told of each. Collective."""
        plan = Plan(Path(tempfile.gettempdir()), end_at=count, saves=False)
        lineage = Lineage("bench", "bench", None, None)
        Trainer(self.built, self._tether, plan, Progress(), lineage, Windows(self._tether, ended)).run()

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
