"""`shardrun plan`: what a run would hold, send and save on any number of ranks, without starting it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from shardrun import report
from shardrun.cli.plan_view import plan_view
from shardrun.config.load import load


def run(config: Path, overrides: list[str], world_size: int | None, json: bool) -> int:
    """Show the plan of the config, for `world_size` ranks if that is given; 0. Raises what forbids such a run."""
    words = overrides if world_size is None else [*overrides, f"topology.world_size={world_size}"]
    settings = load(config, words)
    from shardrun.run.plan import plan

    with contextlib.redirect_stdout(sys.stderr):  # what the recipe prints is not part of the document
        planned = plan(settings).to_json()
    if json:
        report.json_document({"config": str(config), **planned})
    else:
        report.show(plan_view(planned))
    return 0
