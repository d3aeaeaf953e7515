"""`bench --checkpoint`: what the ranks of a config measured of saves and loads, put together. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from shardrun.bench.ranks import job_of, run_job
from shardrun.config.schema import Config

CONTENDERS = ("shardrun", "torch.save", "DCP")
BACKGROUND = "in the background"
_BODY = "shardrun.bench.checkpoint_rank:run"


def measure_checkpoints(config: Config, rounds: int, scratch: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Save and load the model and the optimizer state of the config in `rounds` rounds, on fresh ranks.

    Everything is written below `scratch`, which decides on the disk that is measured. Returns plain JSON: of each
    contender (CONTENDERS) and of the save in the background the median, least and greatest of every figure, a figure
    being that of the rank for which it is worst. Raises RanksFailed, or Interrupted if somebody asked to stop.
    """
    checkpoint = config.checkpoint.model_copy(update={"background": True, "keep": 1, "keep_every": None})
    say(f"{rounds} rounds on {config.topology.world_size} ranks, below {scratch}")
    asked = config.model_copy(update={"checkpoint": checkpoint})
    job = job_of(asked, _BODY, {"rounds": rounds}, scratch / "ranks", times=1 + rounds)
    ranks = run_job(job, "bench --checkpoint")
    return {
        "world_size": config.topology.world_size,
        "threads_per_rank": config.topology.threads_per_rank,
        "split_model": config.checkpoint.split_model,
        "device": ranks[0]["device"],
        "torch": ranks[0]["torch"],
        "rounds": rounds,
        **summary([rank["figures"] for rank in ranks]),
    }


def summary(ranks: Sequence[Mapping[str, Mapping[str, Sequence[float]]]]) -> dict[str, Any]:
    """{"contenders": {name: {figure: {median, min, max}}}, "pause_of_save": ...} of what each rank measured."""
    found = {
        name: {figure: _spread([rank[name][figure] for rank in ranks]) for figure in figures}
        for name, figures in ranks[0].items()
    }
    pause, save = found[BACKGROUND]["pause_s"]["median"], found[CONTENDERS[0]]["save_s"]["median"]
    return {"contenders": found, "pause_of_save": pause / save}


def _spread(ranks: Sequence[Sequence[float]]) -> dict[str, float]:
    worst = [max(values) for values in zip(*ranks, strict=True)]
    return {"median": median(worst), "min": min(worst), "max": max(worst)}
