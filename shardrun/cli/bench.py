"""`shardrun bench`: the same work under shardrun and under each peer, side by side on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrun import report
from shardrun.bench.contenders import COMPUTE, SHARDRUN, at_world_size, chosen, refuse_incomparable
from shardrun.bench.pairs import measure_pairs, require_pairable
from shardrun.bench.ranks import scratch_folder
from shardrun.bench.rounds import Asked, reference_of, run_rounds
from shardrun.bench.standing import DISTANCE_TOLERANCE, LOSS_TOLERANCE, rows
from shardrun.cli.bench_view import bench_view, pairs_view
from shardrun.config.load import load
from shardrun.config.schema import Config
from shardrun.errors import UsageError, VerificationError

_COLLECTIVES = {"--collectives", "--mib", "--backend", "--save"}
_COMPARISON = {"--against", "--steps"}


@dataclass(frozen=True)
class Ask:
    """What the command line asked for."""

    against: str | None = None
    world: int | None = None
    rounds: int = 3
    steps: int = 10
    pairs: int | None = None
    json: bool = False


def refuse_unread(given: Sequence[str]) -> None:
    """UsageError for an option among `given` that the way of measuring which was asked for does not read."""
    if "--collectives" in given:
        way, read = "bench --collectives", _COLLECTIVES
    elif "--checkpoint" in given:
        way, read = "bench --checkpoint", {"--checkpoint"}
    elif "--pairs" in given:
        way, read = "bench --pairs", {"--pairs"}
    else:
        way, read = "bench without --collectives", _COMPARISON
    for option in given:
        if option not in read:
            raise UsageError(f"{option} has no effect in {way}; leave it out")


def run(config: Path | None, overrides: list[str], ask: Ask) -> int:
    """Measure the config under all contenders and show what came out; 0, or 4 if one has computed something else.

    Raises before anything is started: ConfigError, UsageError. Later RanksFailed, or Interrupted.
    """
    if config is None:
        raise UsageError("bench: no CONFIG is given; name the config to measure, or --collectives to measure none")
    settings = at_world_size(load(config, overrides), ask.world)
    peers = chosen(ask.against, settings.topology.world_size)
    refuse_incomparable(settings)
    if ask.pairs is not None:
        require_pairable(settings, ask.pairs)
        with scratch_folder() as scratch:
            document = measure_pairs(settings, ask.pairs, scratch)
        view, void = pairs_view(document), bool(document["differing"])
    else:
        asked = Asked(ask.rounds, ask.steps)
        _require_length(settings, asked)
        with scratch_folder() as scratch:
            document = _compare(settings, (COMPUTE, SHARDRUN, *peers), asked, scratch)
        view, void = bench_view(document), any(one["status"] == "void" for one in document["contenders"])
    if ask.json:
        report.json_document({"config": str(config), **document})
    else:
        report.show(view)
    return VerificationError.exit_code if void else 0


def _compare(settings: Config, names: tuple[str, ...], asked: Asked, scratch: Path) -> dict[str, Any]:
    found = run_rounds(settings, names, asked, scratch, report.error)
    return {
        "world_size": settings.topology.world_size,
        "threads_per_rank": settings.topology.threads_per_rank,
        "micro_batch_size": settings.train.micro_batch_size,
        "global_batch_size": settings.train.global_batch_size,
        "device": found[COMPUTE][0].ranks[0]["device"],
        "rounds": asked.rounds,
        "steps": asked.steps,
        "warmup_steps": asked.warmup,
        "weight_per_step": found[COMPUTE][0].weights[0],
        "reference": reference_of(names),
        "tolerance": {"loss": LOSS_TOLERANCE, "distance": DISTANCE_TOLERANCE},
        "contenders": [row.to_json() for row in rows(names, found)],
    }


def _require_length(settings: Config, asked: Asked) -> None:
    """A run that ends before the last step is measured would be measured short."""
    if (steps := settings.train.steps) is not None and steps < asked.windows:
        raise UsageError(
            f"train.steps is {steps}, and {asked.warmup} steps to warm up and {asked.steps} steps to measure are asked "
            "for; give fewer --steps, or a longer run"
        )
