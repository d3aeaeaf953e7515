"""A checkpoint written again for another number of ranks, as one process without torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrun.checkpoint.byte_copies import Copier
from shardrun.checkpoint.manifest import MANIFEST, parse_manifest, read_manifest, seal, understood
from shardrun.checkpoint.new_folder import new_folder
from shardrun.checkpoint.recut import copy_records, copy_states
from shardrun.checkpoint.store import step_of, tree_problems
from shardrun.errors import CheckpointError, UsageError
from shardrun.records.durable import write_file

RESHARDED = "resharded"
"""Section of a manifest that only a resharded checkpoint has: the world size and the manifest that it was made of."""

CLAIM = (
    "exact, bit for bit: parameters, optimizer state, counters, position in the data. Claimed of nothing else: random "
    "streams begin anew from (seed, step, rank), and another number of ranks adds in another order from here on"
)
_MOST_RANKS = 1 << 16


@dataclass(frozen=True)
class Resharded:
    """A published, durable checkpoint in `path`; `before` is the world size that it came from, `notes` are for the
    user's eyes."""

    path: Path
    step: int
    before: int
    world_size: int
    bytes: int
    seconds: float
    notes: tuple[str, ...]


def reshard(source: Path, target: Path, world_size: int) -> Resharded:
    """Write the checkpoint in the folder `source` for `world_size` ranks, as the new folder `target`.

    Parameters, optimizer state, counters and the position in the data stay what they are, to the bit. Buffers are each
    rank's own: rank r gets those of rank r modulo the old world size. Random streams are left out; whoever resumes
    derives them from (seed, step, rank). Bytes are copied by ranges, in the memory of a few MiB beside the headers, and
    every file of the source is hashed. `target` is the whole checkpoint or not there, see `new_folder`.
    CheckpointError if the source is damaged or cannot be cut; UsageError for a world size or name that cannot be.
    """
    started = time.monotonic()
    manifest, manifest_sha256 = read_manifest(source)
    before = manifest["topology"]["world_size"]
    _check(source, target, manifest, world_size)
    with understood(source), new_folder(target, _needed(manifest, world_size)) as staging:
        copier = Copier(source, staging)
        sections = _of_world(manifest, world_size)
        files = _copy_as_they_are(copier, manifest, world_size)
        for name in _cut_groups(manifest):
            changed, records = copy_records(copier, manifest, name, world_size)
            sections["groups"][name] |= changed
            files += records
        states, notes = copy_states(copier, manifest, world_size)
        files += states
        sections["files"] = sorted(files, key=lambda entry: str(entry["path"]))
        sections[RESHARDED] = {"world_size": before, "manifest_sha256": manifest_sha256}
        sealed = seal(sections)
        parse_manifest(sealed)  # what could not be read back is not published
        write_file(staging / MANIFEST, sealed)
    size = sum(entry["bytes"] for entry in files) + len(sealed)
    return Resharded(target, manifest["step"], before, world_size, size, time.monotonic() - started, tuple(notes))


def _check(source: Path, target: Path, manifest: Mapping[str, Any], world_size: int) -> None:
    before, named = manifest["topology"]["world_size"], step_of(target.name)
    if not 1 <= world_size <= _MOST_RANKS:
        raise UsageError(f"world size {world_size}: 1 to {_MOST_RANKS:,} ranks are possible")
    if world_size == before:
        raise UsageError(f"{source}: is of world size {before} already; there is nothing to reshard")
    if named not in (None, manifest["step"]):
        raise UsageError(f"{target}: is a name for a checkpoint of step {named}, this one is of {manifest['step']}")
    if problems := tree_problems(source, manifest):
        raise CheckpointError("\n  ".join([f"checkpoint {source} is damaged:", *problems]))


def _needed(manifest: Mapping[str, Any], world_size: int) -> int:
    states = [entry["bytes"] for entry in manifest["files"] if entry["role"] == "state"]
    others = sum(entry["bytes"] for entry in manifest["files"] if entry["role"] != "state")
    return int(others + world_size * max(states, default=0))


def _cut_groups(manifest: Mapping[str, Any]) -> list[str]:
    """The groups of the whole world, which are cut for the new one; others keep their members and their records."""
    size = manifest["topology"]["world_size"]
    return [name for name, group in manifest["groups"].items() if _is_everyone(group.get("members"), size)]


def _is_everyone(members: Sequence[int] | None, world_size: int) -> bool:
    """Nothing is made of a world size before it is known that so many ranks have written."""
    return members is None or (len(members) == world_size and list(members) == list(range(len(members))))


def _of_world(manifest: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """The sections of the manifest as a save of `world_size` ranks would write them, but for layouts and files."""
    sections = {key: value for key, value in manifest.items() if key not in ("format", "version", "digest")}
    sections |= {"topology": {**manifest["topology"], "world_size": world_size}, "saved_at": int(time.time())}
    sections["groups"] = {name: dict(group) for name, group in manifest["groups"].items()}
    everyone = list(range(world_size))
    cut = _cut_groups(manifest)
    if "members" in sections["topology"]:
        sections["topology"]["members"] = {**sections["topology"]["members"], **dict.fromkeys(cut, everyone)}
    for section in (sections, *(sections["groups"][name] for name in cut)):
        if "seam" in section.get("numerics", {}):
            seam = _seam(section["numerics"]["seam"], manifest.get("numerics", {}).get("device"), world_size)
            section["numerics"] = {**section["numerics"], "seam": seam}
        if "members" in section:
            section["members"] = everyone
    if "config" in sections:
        topology = {**manifest["config"]["topology"], "world_size": world_size}
        sections["config"] = {**manifest["config"], "topology": topology}
    if "meaning" in sections:
        sections["meaning"] = {**manifest["meaning"], "topology.world_size": world_size}
    return sections


def _seam(saved: str, device: str | None, world_size: int) -> str:
    """How slices travel follows from the world: in a world of one not at all, else as before, or as the device does."""
    if world_size == 1:
        return "none"
    return saved if saved != "none" else "native" if device == "cuda" else "exchange"


def _copy_as_they_are(copier: Copier, manifest: Mapping[str, Any], world_size: int) -> list[dict[str, Any]]:
    """The model, and the records of groups that keep their members; their entries in the manifest."""
    cut = _cut_groups(manifest)
    kept = [e for e in manifest["files"] if e["role"] == "model" or (e["role"] == "record" and e["group"] not in cut)]
    for entry in kept:
        if entry["rank"] >= world_size:
            who = f"group {entry['group']}" if entry["role"] == "record" else entry["path"]
            raise CheckpointError(
                f"{who} has rank {entry['rank']}, which a world of {world_size} does not have; "
                "a group of some of the ranks keeps its members"
            )
    for entry in kept:
        copier.copy_file(entry)
    return kept
