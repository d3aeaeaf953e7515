"""How long a rank computes: forward and backward of a micro-batch, as given or from what bench has measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from shardrun.comm.cost_model import COPY, Links
from shardrun.config.schema import Config
from shardrun.errors import UsageError
from shardrun.run.groups import micro_batches
from shardrun.run.plan import plan
from shardrun.run.traffic import committed_traffic


@dataclass(frozen=True)
class Compute:
    """Forward and backward of one micro-batch on a rank that has its cores to itself."""

    seconds: float
    source: str
    """Where that is known from, in words."""


def compute_of_bench(path: Path, config: Config, links: Links) -> Compute:
    """From the compute row of what `shardrun bench` wrote with --json, of this config on however many ranks.

    A step of that row has a rank's micro-batches, and the optimizer on all parameters, which is taken off as the model
    has it. UsageError for another file, or where nothing would be left.
    """
    try:
        document = json.loads(path.read_bytes())
        (row,) = (one for one in document["contenders"] if one["name"] == "compute")
        step_s, ranks = float(row["step_s"]["median"]), int(document["world_size"])
        size, window = int(document["micro_batch_size"]), int(document["global_batch_size"])
    except (ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"{path}: not what `shardrun bench CONFIG --json` wrote: {type(error).__name__}: {error}; measure again"
        ) from None
    if size != config.train.micro_batch_size:
        raise UsageError(
            f"{path}: measured with train.micro_batch_size {size}, the config has {config.train.micro_batch_size}; "
            "make them equal"
        )
    topology = config.topology.model_copy(update={"world_size": 1, "axes": {}})
    alone = plan(config.model_copy(update={"topology": topology}))
    stepped = sum(committed_traffic(group, 0) for group in alone.groups)
    whole = links.seconds(COPY, stepped / 2, ranks)
    seconds = (step_s - whole) / links.crowd(ranks) / micro_batches(window, size, ranks)
    if seconds <= 0:
        raise UsageError(
            f"{path}: a step of compute took {step_s:.4g} s, and the optimizer of this config alone would take "
            f"{whole:.4g} s; it was measured of another config, or elsewhere"
        )
    return Compute(seconds, f"from compute on {ranks} ranks in {path.name}")
