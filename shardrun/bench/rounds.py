"""Runs the contenders in turn, each in fresh processes, round after round, and gathers what they measured. No torch.

Every round has all contenders, one at a time, so that all have the machine to themselves and a slow minute of it hits
all alike; the order rotates from round to round. A contender trains the same windows from the same start in each round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrun.bench.contenders import COMPUTE, PLAIN, SHARDRUN, how_to_install
from shardrun.bench.ranks import job_of, run_job
from shardrun.config.schema import Config

_BODY = "shardrun.bench.contender:run_contender"


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
    Raises RanksFailed, or Interrupted if somebody asked to stop.
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
            job = job_of(config, _BODY, options, scratch / f"{number}-{name}")
            found[name].append(Measured(run_job(job, f"{name}, round {number + 1}"), asked.warmup))
    return found
