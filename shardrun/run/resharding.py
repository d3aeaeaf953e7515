"""What a run goes on from; where it is of another world size and that was asked for, resharded on the way."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrun.checkpoint.byte_copies import check_files
from shardrun.checkpoint.manifest import read_manifest
from shardrun.checkpoint.reshard import CLAIM, reshard
from shardrun.checkpoint.store import CHECKPOINTS, STAGING, candidates
from shardrun.checkpoint.together import by_root
from shardrun.comm.communicator import Communicator
from shardrun.config.load import from_mapping
from shardrun.config.schema import Config
from shardrun.errors import CheckpointError
from shardrun.records.durable import remove_tree
from shardrun.run.groups import members


@dataclass(frozen=True)
class Source:
    """A run folder or a checkpoint to load. `made_of`: the checkpoint that it was made of, by a reshard for this start.

    `notes` are for the user's eyes.
    """

    path: Path
    made_of: Path | None = None
    regroup: bool = False
    """Whether each rank has to pick its part of it, because the replica sets are others."""
    notes: tuple[str, ...] = ()

    def discard(self) -> None:
        """Remove what was made for this start, once it is loaded; one rank calls it. Else the next save removes it."""
        if self.made_of is not None:
            with contextlib.suppress(OSError):
                remove_tree(self.path)


def find_source(comm: Communicator, job: Mapping[str, Any]) -> Source:
    """Where the job goes on from; collective. With the job's option `reshard`, rank 0 makes it of its world size first.

    CheckpointError on all ranks if what is to be resharded is damaged or cannot be cut.
    """
    options = job["options"]
    asked = Path(options.get("resume_from") or job["run_dir"])
    if not options.get("reshard"):
        return Source(asked)
    scratch = Path(job["run_dir"]) / CHECKPOINTS / STAGING
    fallback = bool(options.get("allow_fallback"))
    config = from_mapping(job["config"])
    found = by_root(comm, "reshard", lambda: _at_world_size(asked, scratch, config, fallback))
    made_of = found["made_of"] and Path(found["made_of"])
    return Source(Path(found["path"]), made_of, bool(found.get("regroup")), tuple(found["notes"]))


def _at_world_size(asked: Path, scratch: Path, config: Config, fallback: bool) -> dict[str, Any]:
    """The fields of a Source, as plain JSON. What is damaged by its sizes already is left for the load to tell."""
    notes: list[str] = []
    for found in candidates(asked):
        if not found.complete and fallback:
            notes.append(f"checkpoint {found.path} is damaged: {found.why}")
            continue
        if not found.complete:
            break
        try:
            source = _taken_up(found.path, scratch, config, check=fallback)
        except CheckpointError as error:
            if not fallback:
                raise
            notes.append(str(error))
            continue
        return {**source, "notes": [*notes, *source["notes"]]}
    return {"path": str(asked), "made_of": None, "notes": notes}


def _taken_up(checkpoint: Path, scratch: Path, config: Config, *, check: bool) -> dict[str, Any]:
    """A checkpoint as this world can take it up: as it is, by parts, or resharded. CheckpointError if it is damaged, as
    far as it was read; `check`: all of it is."""
    sets, axes, world_size = members(config), dict(config.topology.axes), config.topology.world_size
    manifest = read_manifest(checkpoint)[0]
    before, saved = manifest["topology"]["world_size"], manifest["topology"].get("members", {})
    other_axes = manifest.get("config", {}).get("topology", {}).get("axes", {}) != axes
    as_it_is = before == world_size and saved == sets and not other_axes
    spread = any(len(ranks) < before for ranks in saved.values()) or any(len(r) < world_size for r in sets.values())
    by_parts = spread or other_axes  # along other axes frozen parts of the model may move, too
    if check and (as_it_is or by_parts):  # a reshard reads everything itself
        check_files(checkpoint, manifest)
    if as_it_is:
        return {"path": str(checkpoint), "made_of": None, "notes": []}
    if by_parts:
        told = f"{checkpoint.name} was regrouped from {_told(saved)} to {_told(sets)}; {CLAIM}"
        return {"path": str(checkpoint), "made_of": None, "regroup": True, "notes": [told]}
    target = scratch / f"{checkpoint.name}.{world_size}-ranks.{secrets.token_hex(4)}"
    done = reshard(checkpoint, target, world_size)
    return {"path": str(target), "made_of": str(checkpoint), "notes": done.notes}


def _told(sets: Mapping[str, list[int]]) -> str:
    return ", ".join(f"{name} on ranks {','.join(map(str, ranks))}" for name, ranks in sets.items())
