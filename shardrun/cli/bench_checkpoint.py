"""`shardrun bench --checkpoint`: what saves and loads of a config take, beside torch.save and torch's own DCP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardrun import report
from shardrun.bench.checkpoint import BACKGROUND, CONTENDERS, measure_checkpoints
from shardrun.bench.contenders import at_world_size, refuse_incomparable
from shardrun.bench.ranks import scratch_folder
from shardrun.cli.inspect_view import plain_table, size
from shardrun.config.load import load
from shardrun.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

_WORKS = {"save": "save s", "load": "load s, not cached", "cached_load": "load s, cached"}


@dataclass(frozen=True)
class Ask:
    """What the command line asked for."""

    world: int | None = None
    rounds: int = 3
    json: bool = False


def run(config: Path | None, overrides: list[str], ask: Ask) -> int:
    """Measure and show it; 0. Raises before anything is started: ConfigError, UsageError; later as
    `measure_checkpoints` does."""
    if config is None:
        raise UsageError("bench --checkpoint: no CONFIG is given; name the config whose saves are to be measured")
    settings = at_world_size(load(config, overrides), ask.world)
    refuse_incomparable(settings)
    run_dir = Path(settings.run.dir).absolute()
    with scratch_folder(next(one for one in run_dir.parents if one.is_dir())) as scratch:
        document = measure_checkpoints(settings, ask.rounds, scratch, report.error)
    if ask.json:
        report.json_document({"config": str(config), **document})
    else:
        report.show(checkpoint_view(document))
    return 0


def checkpoint_view(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The document of `measure_checkpoints`."""
    found, count = document["contenders"], document["world_size"]
    yield (
        f"{count} rank{'s' * (count != 1)} on {document['device']}, torch {document['torch']}; median of "
        f"{document['rounds']} rounds (least to greatest), of the slower rank; all files are fsynced"
    )
    rows = [
        [name, *(_times(found[name], work) for work in _WORKS), size(int(found[name]["bytes"]["median"]))]
        for name in CONTENDERS
    ]
    yield plain_table(["", *(f">{title}" for title in _WORKS.values()), ">on disk"], rows)
    yield plain_table(
        ["CPU seconds and memory", ">save CPU s", ">load CPU s", ">save memory", ">load memory"],
        [
            [
                name,
                *(f"{found[name][f'{work}_cpu_s']['median']:.3f}" for work in ("save", "load")),
                *(size(int(found[name][f"{work}_memory_bytes"]["median"])) for work in ("save", "load")),
            ]
            for name in CONTENDERS
        ],
    )
    aside = found[BACKGROUND]
    pause = aside["pause_s"]
    memory = size(int(aside["save_memory_bytes"]["median"]))
    yield (
        f"with checkpoint.async the training stands still for {_spread(pause)} s, "
        f"{100 * document['pause_of_save']:.1f} % of a save; a checkpoint is published after "
        f"{aside['published_after_s']['median']:.1f} s of training, and takes {memory} of memory meanwhile"
    )


def _times(figures: Mapping[str, Mapping[str, float]], work: str) -> str:
    return _spread(figures[f"{work}_s"])


def _spread(one: Mapping[str, float]) -> str:
    return f"{one['median']:.3f} ({one['min']:.3f} to {one['max']:.3f})"
