"""`shardrun bench --collectives`: how fast the ranks of this host exchange, copy and agree, and which way is faster."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from shardrun import report
from shardrun.bench.collectives import Asked, measure_links, to_json
from shardrun.bench.ranks import scratch_folder
from shardrun.cli.collectives_view import collectives_view
from shardrun.comm.cost_model import save_links
from shardrun.errors import UsageError

_MIB = 1 << 20


@dataclass(frozen=True)
class Ask:
    """What the command line asked for."""

    world: str | None = None
    mib: str = "1,16,256"
    backend: str = "gloo"
    rounds: int = 5
    save: Path | None = None
    json: bool = False


def run(config: Path | None, ask: Ask) -> int:
    """Measure and show it, and save the cost model if that is asked for; 0. Raises as `measure_links` does."""
    if config is not None:
        raise UsageError(f"--collectives measures without a config, and {config} is given; leave one of them out")
    if ask.save is not None and not ask.save.parent.is_dir():
        raise UsageError(f"--save: no folder {ask.save.parent}; make it first")
    worlds = _default_worlds() if ask.world is None else _whole_numbers(ask.world, 2)
    sizes = [int(one * _MIB) for one in _numbers("--mib", ask.mib, "numbers", 1 / 1024)]
    with scratch_folder() as scratch:
        rows, links = measure_links(Asked(worlds, sizes, ask.backend, ask.rounds), scratch, report.error)
    if ask.save is not None:
        save_links(links, ask.save)
    document = to_json(rows, links)
    if ask.json:
        report.json_document(document)
    else:
        report.show(collectives_view(document))
    return 0


def _default_worlds() -> list[int]:
    """2, 4 and 8 ranks, as far as each has a core; 2 at least."""
    return [ranks for ranks in (2, 4, 8) if ranks <= max(2, len(os.sched_getaffinity(0)))]


def one_world(text: str | None) -> int | None:
    """`--world` of a comparison, which has one world; UsageError for anything else."""
    if text is None:
        return None
    found = _whole_numbers(text, 1)
    if len(found) > 1:
        raise UsageError(f"--world: {text!r} given, expected one number; several worlds are for --collectives")
    return found[0]


def _whole_numbers(text: str, least: int) -> list[int]:
    return [int(one) for one in _numbers("--world", text, "whole numbers", least)]


def _numbers(option: str, text: str, kind: str, least: float) -> list[float]:
    """Numbers with commas between, each once, in rising order."""
    try:
        found = sorted({float(int(word) if kind == "whole numbers" else float(word)) for word in text.split(",")})
    except (ValueError, OverflowError):
        found = []
    if not found or not all(least <= one < math.inf for one in found):
        raise UsageError(f"{option}: {text!r} given, expected {kind} of at least {least:g} with commas between")
    return found
