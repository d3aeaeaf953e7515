"""From the records of one world to those of another: who holds what then, and which elements go where.

Integers only. Under zero2 the canonical space and its buckets stay as they are and are cut into another number of
slices; under zero1 tensors stay whole and get other owners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardrun.errors import CheckpointError
from shardrun.records.fit import cover_violations, holds_whole
from shardrun.shard.contract import Contract
from shardrun.shard.layout import FlatLayout
from shardrun.shard.owners import balanced_owners, replan_owned

Fragments = Mapping[str, list[int]]
"""Path -> [start, stop): what one rank holds of the flattened parameters."""

# What a record's own meta may hold. Anything else is something that only the old world can make sense of.
_KNOWN = {"version", "rank", "world_size", "step_count", "state", "costs"}
_BY_PATH = ("state", "costs")


@dataclass(frozen=True)
class Copy:
    """The elements [start, stop) of a flattened parameter, which rank `source` holds and rank `target` gets."""

    source: int
    target: int
    start: int
    stop: int


@dataclass(frozen=True)
class Cut:
    """The records of a group in a world: fragments and own meta by rank, and what changes in the group's section of
    the manifest."""

    section: dict[str, Any]
    fragments: list[dict[str, list[int]]]
    metas: list[dict[str, Any]]


def cut_again(
    section: Mapping[str, Any], held: Sequence[Fragments], metas: Sequence[Mapping[str, Any]], world_size: int
) -> Cut:
    """What a session of `world_size` ranks would hold of a group that `len(held)` ranks hold now.

    `section`, `held` and `metas` (by rank) are as in a manifest. CheckpointError where the records do not make one
    whole state, or hold something that belongs to their own world alone, such as a half-filled window.
    """
    foreign = [f"rank {rank}: {key}" for rank, meta in enumerate(metas) for key in sorted(meta.keys() - _KNOWN)]
    if foreign:
        raise CheckpointError(
            f"its records hold more than the state at the end of an update ({', '.join(foreign)}), such as a "
            f"half-filled window, which belongs to {len(held)} ranks; go on at that world size and save after an update"
        )
    _require_alike(metas)
    changed, layout = {}, FlatLayout.from_json(section["layout"])
    if holds_whole(section):
        before = section["optimizer"]["owners"]
        owners = balanced_owners(_costs(section, metas), world_size)
        layout = replan_owned(layout, before, owners, world_size)
        changed = {"layout": layout.to_json(), "optimizer": {**section["optimizer"], "owners": owners}}
    fragments = [
        {path: list(extent) for path, extent in layout.fragments(rank, world_size).items()}
        for rank in range(world_size)
    ]
    for side in (held, fragments):
        if found := cover_violations(section["contract"], dict(enumerate(side)), whole=holds_whole(section)):
            raise CheckpointError("its records are not whole: " + "; ".join(found[:5]))
    return Cut(changed, fragments, [_meta(metas, rank, fragments[rank], world_size) for rank in range(world_size)])


def _require_alike(metas: Sequence[Mapping[str, Any]]) -> None:
    first = {**metas[0], "world_size": len(metas)}
    for rank, meta in enumerate(metas):
        for key in sorted(_KNOWN - {*_BY_PATH, "rank"}):
            if meta.get(key) != first.get(key):
                raise CheckpointError(
                    f"the record of rank {rank} has {key} {meta.get(key)}, expected {first.get(key)} as on rank 0"
                )
        if meta.get("rank") != rank:
            raise CheckpointError(f"the record of rank {rank} is marked as that of rank {meta.get('rank')}")


def _costs(section: Mapping[str, Any], metas: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """What the session balanced its owners by; elements, where the records are too old to tell."""
    told = {path: cost for meta in metas for path, cost in meta.get("costs", {}).items()}
    specs = Contract.from_json(section["contract"]).distinct()
    return {spec.path: told.get(spec.path, max(spec.numel, 1)) for spec in specs if spec.trainable}


def _meta(metas: Sequence[Mapping[str, Any]], rank: int, fragments: Fragments, world_size: int) -> dict[str, Any]:
    meta = {**metas[0], "rank": rank, "world_size": world_size}
    for key in _BY_PATH:
        if any(key in one for one in metas):
            told = {path: value for one in metas for path, value in one.get(key, {}).items()}
            meta[key] = {path: told[path] for path in fragments if path in told}
    return meta


def copies(held: Sequence[Fragments], wanted: Sequence[Fragments]) -> dict[str, list[Copy]]:
    """Path -> the copies that make `wanted` (by rank) of `held` (by rank), in the order of the elements.

    Both sides hold every element exactly once, see `cover_violations`.
    """
    before, after = _by_path(held), _by_path(wanted)
    return {
        path: [
            Copy(source, target, max(low, start), min(high, stop))
            for start, stop, target in targets
            for low, high, source in before[path]
            if max(low, start) < min(high, stop)
        ]
        for path, targets in after.items()
    }


def _by_path(fragments: Sequence[Fragments]) -> dict[str, list[tuple[int, int, int]]]:
    found: dict[str, list[tuple[int, int, int]]] = {}
    for rank, of_rank in enumerate(fragments):
        for path, (start, stop) in of_rank.items():
            found.setdefault(path, []).append((start, stop, rank))
    return {path: sorted(parts) for path, parts in found.items()}
