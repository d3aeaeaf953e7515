"""What the paired steps of `bench.paired` come to: ratios of wall and CPU time with their intervals. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from shardrun.bench.interval import interval
from shardrun.bench.ranks import job_of, run_job
from shardrun.config.schema import Config
from shardrun.errors import ConfigError

_BODY = "shardrun.bench.paired:run_pairs"
_WARM = 4


def require_pairable(config: Config, pairs: int) -> None:
    """ConfigError for what cannot be run in pairs that end with the same bits."""
    problems = []
    if config.topology.world_size != 1:
        problems.append(f"--pairs is for one process, and there are {config.topology.world_size} ranks; add --world 1")
    if config.train.max_grad_norm is not None:
        problems.append(
            f"train.max_grad_norm: {config.train.max_grad_norm}: torch's own clipping rounds the norm in float32, and "
            "--pairs compares bits; give train.max_grad_norm=null"
        )
    if (steps := config.train.steps) is not None and steps < pairs + _WARM:
        problems.append(f"train.steps: {steps} is less than {pairs} pairs and {_WARM} to warm up")
    if pairs % 2:
        problems.append(f"--pairs {pairs} is odd, and who goes first has to change evenly; give an even number")
    if problems:
        raise ConfigError([f"bench: {text}" for text in problems])


def measure_pairs(config: Config, pairs: int, scratch: Path) -> dict[str, Any]:
    """Run `pairs` pairs after a few others; the document of it. Raises RanksFailed or Interrupted."""
    job = job_of(config, _BODY, {"pairs": pairs + _WARM}, scratch / "pairs")
    (found,) = run_job(job, "pairs of shardrun and plain")
    ours, plain = found["ours"][_WARM:], found["plain"][_WARM:]
    return {
        "device": found["device"],
        "threads_per_rank": config.topology.threads_per_rank,
        "pairs": pairs,
        "warmup_pairs": _WARM,
        "wall": _paired([wall for wall, _ in ours], [wall for wall, _ in plain]),
        "cpu": _paired([cpu for _, cpu in ours], [cpu for _, cpu in plain]),
        "differing": found["differing"],
    }


def _paired(ours: Sequence[float], plain: Sequence[float]) -> dict[str, Any]:
    middle, low, high = interval([one / other for one, other in zip(ours, plain, strict=True)])
    return {
        "shardrun_s": median(ours),
        "plain_s": median(plain),
        "ratio": middle,
        "interval": [low, high],
        "pairs_s": list(zip(ours, plain, strict=True)),
    }
