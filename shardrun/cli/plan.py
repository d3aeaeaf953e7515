"""`shardrun plan`: what a run would hold, send and save on any number of ranks, and how long a step would take."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

from shardrun import report
from shardrun.cli.plan_view import plan_view
from shardrun.comm.cost_model import read_links
from shardrun.config.load import load
from shardrun.errors import UsageError


@dataclass(frozen=True)
class Ask:
    """What the command line asked for."""

    world: int | None = None
    links: Path | None = None
    compute_s: float | None = None
    bench: Path | None = None
    json: bool = False


def run(config: Path, overrides: list[str], ask: Ask) -> int:
    """Show the plan of the config; 0. Raises what forbids such a run, and UsageError for links that cannot be read."""
    _refuse_half(ask)
    words = overrides if ask.world is None else [*overrides, f"topology.world_size={ask.world}"]
    settings = load(config, words)
    links = None if ask.links is None else read_links(ask.links)
    from shardrun.run.compute_time import Compute, compute_of_bench
    from shardrun.run.plan import plan
    from shardrun.run.step_time import predict

    with contextlib.redirect_stdout(sys.stderr):  # what the recipe prints is not part of the document
        planned = plan(settings)
        document = planned.to_json()
        if links is not None:
            compute = None if ask.compute_s is None else Compute(ask.compute_s, "as given")
            if ask.bench is not None:
                compute = compute_of_bench(ask.bench, settings, links)
            document["step_time"] = predict(planned, links, compute).to_json()
    if ask.json:
        report.json_document({"config": str(config), **document})
    else:
        report.show(plan_view(document))
    return 0


def _refuse_half(ask: Ask) -> None:
    given = [name for name, value in (("--compute-s", ask.compute_s), ("--bench", ask.bench)) if value is not None]
    if len(given) == 2:
        raise UsageError("--compute-s and --bench both tell how long compute takes; give one of them")
    if given and ask.links is None:
        raise UsageError(f"{given[0]} is for a part of a step whose other parts come from --links FILE; give both")
