"""Runs the contenders in turn, each in fresh processes, round after round, and gathers what they measured. No torch.

Every round has all contenders, one at a time, so that all have the machine to themselves and a slow minute of it hits
all alike; the order rotates from round to round. A contender trains the same windows from the same start in each round.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrun.bench.contenders import COMPUTE, PLAIN, SHARDRUN, how_to_install
from shardrun.config.schema import Config
from shardrun.errors import Interrupted, ShardrunError
from shardrun.run.launch import launch
from shardrun.run.outcome import Outcome
from shardrun.run.worker_process import Job

_COMMAND = (sys.executable, "-m", "shardrun.bench.contender_main")
_LAST_LINES = 12


class ContenderFailed(ShardrunError):
    """A rank of a contender failed: nothing is compared."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Asked:
    """How much is run: `steps` windows are timed in each of `rounds`, after `warmup` others."""

    rounds: int
    steps: int
    warmup: int = 2

    @property
    def windows(self) -> int:
        """Of one contender in one round."""
        return self.warmup + self.steps


@dataclass(frozen=True)
class Measured:
    """What the ranks of one contender measured in one round."""

    ranks: Sequence[Mapping[str, Any]]
    warmup: int

    @property
    def steps_s(self) -> list[float]:
        """Seconds of each timed window on the slowest rank."""
        slowest = [max(seconds) for seconds in zip(*(rank["windows_s"] for rank in self.ranks), strict=True)]
        return slowest[self.warmup :]

    @property
    def losses(self) -> list[float]:
        """Mean losses of all windows over all ranks."""
        return list(self.ranks[0]["losses"])

    @property
    def weights(self) -> list[int]:
        """Tokens, or whatever the loss counts, of each timed window over all ranks."""
        return list(self.ranks[0]["weights"][self.warmup :])

    def worst(self, key: str) -> Any:
        """The largest of what the ranks have under `key`."""
        return max(rank[key] for rank in self.ranks)


Rounds = dict[str, list[Measured]]


def reference_of(names: Sequence[str]) -> str | None:
    """The contender that the others are held against; None where there is nobody to be compared."""
    others = [name for name in names if name != COMPUTE]
    if len(others) < 2:
        return None
    return next((name for name in ("ddp", PLAIN, SHARDRUN) if name in others), others[0])


def run_rounds(config: Config, names: Sequence[str], asked: Asked, scratch: Path, say: Callable[[str], None]) -> Rounds:
    """Each contender's measurements, a round after the other.

    `scratch` has to be empty; `say` gets a line before each. Contenders that lack what they need are passed over.
    Raises ContenderFailed, or Interrupted if somebody asked to stop.
    """
    reference = reference_of(names)
    ready = [name for name in names if how_to_install(name) is None]
    first = sorted(ready, key=lambda name: name != reference)  # its parameters are there before others are compared
    found: Rounds = {name: [] for name in ready}
    for number in range(asked.rounds):
        turn = number % len(first)
        for name in first[turn:] + first[:turn]:
            say(f"round {number + 1} of {asked.rounds}: {name}")
            options: dict[str, Any] = {"contender": name, "windows": asked.windows}
            if number == 0 and reference is not None and name != COMPUTE:
                verb = "save" if name == reference else "compare"
                options[f"{verb}_parameters"] = str(scratch / "reference.safetensors")
            where = f"{name}, round {number + 1}"
            found[name].append(Measured(run_ranks(config, options, scratch / f"{number}-{name}", where), asked.warmup))
    return found


def run_ranks(config: Config, options: Mapping[str, Any], folder: Path, where: str) -> list[dict[str, Any]]:
    """Start fresh ranks for what `options` names and wait for them; what each has written in `folder`."""
    folder.mkdir()
    topology = config.topology
    quiet = config.model_copy(update={"eval": config.eval.model_copy(update={"every": None, "at_end": False})})
    job = Job(
        {"config": quiet.model_dump(mode="json"), "run_dir": str(folder), "options": dict(options)},
        folder,
        topology.world_size,
        threads_per_rank=topology.threads_per_rank,
        allow_non_loopback=topology.allow_non_loopback,
        command=_COMMAND,
    )
    screen = _LastLines()
    outcome = launch(job, screen)
    if outcome.exit_code == Interrupted.exit_code or screen.stopping:
        raise Interrupted(f"stopped in {where}; nothing is compared")
    if outcome.exit_code != 0:
        raise ContenderFailed(f"{where}: {_told(outcome, screen)}", outcome.exit_code)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(topology.world_size)]


class _LastLines:
    """A screen that shows nothing and keeps the last lines that each rank printed."""

    def __init__(self) -> None:
        self.stopping = False
        self.lines: dict[int, deque[str]] = {}

    def event(self, rank: int, event: Mapping[str, Any]) -> list[str]:
        self.stopping |= event["event"] == "stopping"
        return []

    def output(self, rank: int, text: str) -> None:
        self.lines.setdefault(rank, deque(maxlen=_LAST_LINES)).append(text)


def _told(outcome: Outcome, screen: _LastLines) -> str:
    """What went wrong: the reason, the error with its place, and the last lines of that rank."""
    lines, culprit = [outcome.reason], outcome.culprit
    if culprit is not None and (cause := culprit.failure) is not None:
        place = f"\n    at {cause.file}:{cause.line}" if cause.file is not None else ""
        lines.append(f"  {cause.type}: {cause.message}{place}")
    if culprit is not None and (last := screen.lines.get(culprit.rank)):
        lines += [f"  the last lines of rank {culprit.rank}:", *(f"    {text}" for text in last)]
    return "\n".join(lines)
