"""The tables at the start of a run: what is trained, with which options, and what it costs on each rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from shardrun.config.groups import places, replica_sets
from shardrun.optim.kinds import update_cost
from shardrun.run.build import Built
from shardrun.run.groups import TrainedGroup
from shardrun.run.model import weight_bytes
from shardrun.run.optimizer import Sharded, Share, shares

Table = dict[str, Any]

_MOST_NAMES = 6


def start_tables(built: Built) -> list[Table]:
    """Ranks, selections, optimizers and their owners, and the bytes per rank; collective, as bytes differ."""
    tables = [_places(built)] if built.config.topology.axes else []
    for group in built.groups:
        prefix = f"{group.name}: " if len(built.groups) > 1 else ""
        parts = shares(group.sharded)
        mine = [_selection(built, group), _option_groups(group, parts)]
        if len(parts) > 1:
            mine.append(_split(group, parts))
        if group.sharded.strategy == "zero1" and group.comm.world_size > 1:
            mine.append(_owners(group, parts))
        tables += [{**table, "title": prefix + table["title"]} for table in mine]
    return [*tables, _memory(built)]


def _places(built: Built) -> Table:
    """Which ranks hold the same part of each group: equal numbers in a column."""
    axes, world = built.config.topology.axes, range(built.comm.world_size)
    sets = {g.name: replica_sets(g.asked.replicas, axes, len(world)) for g in built.groups}
    rows = [
        [
            f"rank {rank}",
            ", ".join(f"{axis} {number}" for axis, number in place.items()),
            *(next(number for number, ranks in enumerate(held) if rank in ranks) for held in sets.values()),
        ]
        for rank, place in zip(world, places(axes), strict=True)
    ]
    return {"title": "ranks", "columns": ["rank", "place", *(f"part of {name}" for name in sets)], "rows": rows}


def _selection(built: Built, group: TrainedGroup) -> Table:
    selection = group.selection
    selected = {id(p): p for p in selection.parameters.values()}
    trained = [p for p in selected.values() if p.requires_grad]
    rows = [[text, f"{count} paths"] for text, count in selection.matches.items()]
    rows += [[f"not {text}", "excluded"] for text in group.asked.select.exclude]
    rows.append(["trained", f"{len(trained)} tensors, {sum(p.numel() for p in trained):,} elements"])
    if group is built.groups[-1]:
        taken = {id(p) for p in built.selected.values() if p.requires_grad}
        kept = [p for key, p in {id(p): p for p in built.model.parameters()}.items() if key not in taken]
        rows.append(["frozen", f"{len(kept)} tensors, {sum(p.numel() for p in kept):,} elements"])
    return {"title": "selection", "columns": ["select", "matches"], "rows": rows}


def _option_groups(trained: TrainedGroup, parts: Sequence[Share]) -> Table:
    rows = []
    for part in parts:
        for number, (group, paths) in enumerate(zip(part.optimizer.param_groups, part.paths, strict=True)):
            if not paths and len(parts) > 1:
                continue  # an option group of the other optimizer's parameters
            which = number if len(parts) == 1 else f"{part.kind.name} {number}"
            kernel = "fused" if group.get("fused") else "plain"
            decay = group.get("weight_decay", 0.0)
            told = [f"{_elements(trained, paths):,}", f"{group['lr']:g}", f"{decay:g}", kernel]
            rows.append([which, len(paths), *told])
    title = f"{' + '.join(part.kind.name for part in parts)} under {trained.sharded.strategy}"
    return {"title": title, "columns": ["group", "tensors", "elements", "lr", "weight decay", "kernel"], "rows": rows}


def _split(trained: TrainedGroup, parts: Sequence[Share]) -> Table:
    """Which parameters each optimizer steps."""
    rows = []
    for part in parts:
        paths = [path for group in part.paths for path in group]
        nbytes = sum(trained.sharded.parameters[path].nbytes for path in paths)
        rows.append([part.kind.name, len(paths), f"{nbytes:,}", names(paths)])
    return {"title": "split", "columns": ["optimizer", "tensors", "bytes", "parameters"], "rows": rows}


def names(paths: Sequence[str]) -> str:
    """The paths in a few words: layers that differ in their number alone are one."""
    found = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", path) for path in paths))
    more = len(found) - _MOST_NAMES
    return ", ".join([*found[:_MOST_NAMES], *([f"{more} more"] if more > 0 else [])])


def _owners(trained: TrainedGroup, parts: Sequence[Share]) -> Table:
    """What each rank owns, and what its updates cost of all: elements, or the products of Newton-Schulz."""
    sharded = trained.sharded
    costs = {
        path: update_cost(part.kind, sharded.parameters[path].shape, part.optimizer.param_groups[0])
        for part in parts
        for paths in part.paths
        for path in paths
    }
    rows = []
    for number, rank in enumerate(trained.comm.ranks):
        owned = list(sharded.layout.fragments(number, trained.comm.world_size))
        share = sum(costs[path] for path in owned) / sum(costs.values())
        rows.append([f"rank {rank}", len(owned), f"{_elements(trained, owned):,}", f"{share:.1%}"])
    return {"title": "owners", "columns": ["owner", "tensors", "elements", "cost of updates"], "rows": rows}


def _elements(trained: TrainedGroup, paths: Sequence[str]) -> int:
    return sum(trained.sharded.parameters[path].numel() for path in paths)


def _memory(built: Built) -> Table:
    weights = weight_bytes(built.model)
    own = [[g.name, *(gradient_bytes(g.sharded)), g.sharded.state_nbytes] for g in built.groups]
    several = len(built.groups) > 1
    rows = []
    for rank, (held, groups) in enumerate(built.comm.agree("bytes per rank", (weights, own))):
        for number, (name, *counts) in enumerate(groups):
            first = f"{held:,}" if number == 0 else ""
            rows.append([f"rank {rank}", *([name] if several else []), first, *(f"{count:,}" for count in counts)])
    columns = ["bytes", *(["group"] if several else []), "weights", "gradients", "slices in a step", "optimizer state"]
    return {"title": "memory", "columns": columns, "rows": rows}


def gradient_bytes(sharded: Sharded) -> tuple[int, int]:
    """Bytes of pending gradients, and of what a step needs beside them, on this rank."""
    held = sharded.gradient_nbytes
    return held["pending"], sum(held.values()) - held["pending"]
