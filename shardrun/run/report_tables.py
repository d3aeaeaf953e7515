"""The tables at the start of a run: what is trained, with which options, and what it costs on each rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from shardrun.optim.kinds import update_cost
from shardrun.run.build import Built
from shardrun.run.optimizer import Share, shares

Table = dict[str, Any]

_MOST_NAMES = 6


def start_tables(built: Built) -> list[Table]:
    """The selection, the optimizers and their owners, and the bytes per rank; collective, as bytes differ."""
    parts = shares(built.sharded)
    tables = [_selection(built), _option_groups(built, parts)]
    if len(parts) > 1:
        tables.append(_split(built, parts))
    if built.sharded.strategy == "zero1" and built.comm.world_size > 1:
        tables.append(_owners(built, parts))
    return [*tables, _memory(built)]


def _selection(built: Built) -> Table:
    selection, model = built.selection, built.model
    distinct = {id(p): p for p in model.parameters()}
    selected = {id(p): p for p in selection.parameters.values()}
    trained = [p for p in selected.values() if p.requires_grad]
    rows = [[text, f"{count} paths"] for text, count in selection.matches.items()]
    rows += [[f"not {text}", "excluded"] for text in built.config.select.exclude]
    rows.append(["trained", f"{len(trained)} tensors, {sum(p.numel() for p in trained):,} elements"])
    kept = [p for key, p in distinct.items() if key not in selected or not p.requires_grad]
    rows.append(["frozen", f"{len(kept)} tensors, {sum(p.numel() for p in kept):,} elements"])
    return {"title": "selection", "columns": ["select", "matches"], "rows": rows}


def _option_groups(built: Built, parts: Sequence[Share]) -> Table:
    rows = []
    for part in parts:
        for number, (group, paths) in enumerate(zip(part.optimizer.param_groups, part.paths, strict=True)):
            if not paths and len(parts) > 1:
                continue  # an option group of the other optimizer's parameters
            which = number if len(parts) == 1 else f"{part.kind.name} {number}"
            kernel = "fused" if group.get("fused") else "plain"
            decay = group.get("weight_decay", 0.0)
            told = [f"{_elements(built, paths):,}", f"{group['lr']:g}", f"{decay:g}", kernel]
            rows.append([which, len(paths), *told])
    title = f"{' + '.join(part.kind.name for part in parts)} under {built.sharded.strategy}"
    return {"title": title, "columns": ["group", "tensors", "elements", "lr", "weight decay", "kernel"], "rows": rows}


def _split(built: Built, parts: Sequence[Share]) -> Table:
    """Which parameters each optimizer steps."""
    rows = []
    for part in parts:
        paths = [path for group in part.paths for path in group]
        nbytes = sum(built.sharded.parameters[path].nbytes for path in paths)
        rows.append([part.kind.name, len(paths), f"{nbytes:,}", names(paths)])
    return {"title": "split", "columns": ["optimizer", "tensors", "bytes", "parameters"], "rows": rows}


def names(paths: Sequence[str]) -> str:
    """The paths in a few words: layers that differ in their number alone are one."""
    found = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", path) for path in paths))
    more = len(found) - _MOST_NAMES
    return ", ".join([*found[:_MOST_NAMES], *([f"{more} more"] if more > 0 else [])])


def _owners(built: Built, parts: Sequence[Share]) -> Table:
    """What each rank owns, and what its updates cost of all: elements, or the products of Newton-Schulz."""
    sharded, world = built.sharded, range(built.comm.world_size)
    costs = {
        path: update_cost(part.kind, sharded.parameters[path].shape, part.optimizer.param_groups[0])
        for part in parts
        for paths in part.paths
        for path in paths
    }
    rows = []
    for rank in world:
        owned = list(sharded.layout.fragments(rank, len(world)))
        share = sum(costs[path] for path in owned) / sum(costs.values())
        rows.append([f"rank {rank}", len(owned), f"{_elements(built, owned):,}", f"{share:.1%}"])
    return {"title": "owners", "columns": ["owner", "tensors", "elements", "cost of updates"], "rows": rows}


def _elements(built: Built, paths: Sequence[str]) -> int:
    return sum(built.sharded.parameters[path].numel() for path in paths)


def _memory(built: Built) -> Table:
    sharded = built.sharded
    weights = sum(p.numel() * p.element_size() for p in {id(p): p for p in built.model.parameters()}.values())
    gradient = sharded.gradient_nbytes
    own = [weights, gradient["pending"], gradient["reduced"] + gradient.get("proposed", 0), sharded.state_nbytes]
    rows = [
        [f"rank {rank}", *(f"{count:,}" for count in counts)]
        for rank, counts in enumerate(built.comm.agree("bytes per rank", own))
    ]
    columns = ["bytes", "weights", "gradients", "slices in a step", "optimizer state"]
    return {"title": "memory", "columns": columns, "rows": rows}
