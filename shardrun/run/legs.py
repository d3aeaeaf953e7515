"""One leg of a proof: a job of fresh processes in a scratch folder, which has to end as expected. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrun.config.schema import Config
from shardrun.errors import Interrupted, ShardrunError
from shardrun.run.launch import Screen, launch
from shardrun.run.outcome import Outcome
from shardrun.run.worker_process import Job

Start = Callable[[Job, Screen], Outcome]


class LegFailed(ShardrunError):
    """A leg of the proof did not come to its end. Its logs are in `run_dir`."""

    def __init__(self, leg: str, outcome: Outcome, run_dir: Path) -> None:
        super().__init__(f"{leg} failed: {outcome.reason}")
        self.exit_code = outcome.exit_code or 1
        self.outcome = outcome
        self.run_dir = run_dir


@dataclass(frozen=True)
class Legs:
    """How legs are run: `screen` hears of them, `start` runs the processes of one to their end."""

    screen: Screen
    start: Start = launch

    def run(
        self, name: str, settings: Config, run_dir: Path, options: Mapping[str, Any], expected: Collection[int]
    ) -> None:
        """Train `settings` in `run_dir`. LegFailed unless the exit code is one of `expected`; Interrupted if somebody
        asked to stop."""
        settings = settings.model_copy(update={"run": settings.run.model_copy(update={"dir": run_dir})})
        topology = settings.topology
        job = Job(
            {"config": settings.model_dump(mode="json"), "run_dir": str(run_dir), "options": dict(options)},
            run_dir,
            topology.world_size,
            threads_per_rank=topology.threads_per_rank,
            allow_non_loopback=topology.allow_non_loopback,
        )
        screen = _Noting(self.screen)
        outcome = self.start(job, screen)
        if screen.stopping:
            raise Interrupted(f"stopped during {name}; nothing is proven")
        if outcome.exit_code not in expected:
            raise LegFailed(name, outcome, run_dir)


class _Noting:
    """Passes everything on, and notes whether somebody asked to stop."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self.stopping = False

    def event(self, rank: int, event: Mapping[str, Any]) -> list[str]:
        self.stopping |= event["event"] == "stopping"
        return self._screen.event(rank, event)

    def output(self, rank: int, text: str) -> None:
        self._screen.output(rank, text)
