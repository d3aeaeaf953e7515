"""The tables at the start of a run: what is trained, with which options, and what it costs on each rank."""

from __future__ import annotations

from typing import Any

from shardrun.run.build import Built

Table = dict[str, Any]


def start_tables(built: Built) -> list[Table]:
    """The selection, the option groups and the bytes per rank; collective, because bytes differ between ranks."""
    return [_selection(built), _option_groups(built), _memory(built)]


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


def _option_groups(built: Built) -> Table:
    zero2 = built.zero2
    specs = {spec.path: spec for spec in zero2.session.contract.specs}
    members: dict[int, list[str]] = {}
    for space in zero2.layout.spaces:
        members.setdefault(space.option_group, []).extend(placed.path for placed in space.parameters)
    rows = []
    for group, options in enumerate(zero2.slice_optimizer.options):
        paths = members.get(group, [])
        lr = zero2.optimizer.param_groups[group]["lr"]
        decay = options.get("weight_decay", 0.0)
        kernel = "fused" if options["fused"] else "plain"
        rows.append([group, len(paths), f"{sum(specs[p].numel for p in paths):,}", f"{lr:g}", f"{decay:g}", kernel])
    title = f"{zero2.kind.name} under zero2"
    return {"title": title, "columns": ["group", "tensors", "elements", "lr", "weight decay", "kernel"], "rows": rows}


def _memory(built: Built) -> Table:
    zero2 = built.zero2
    weights = sum(p.numel() * p.element_size() for p in {id(p): p for p in built.model.parameters()}.values())
    gradient = zero2.gradient_nbytes
    own = [weights, gradient["pending"], gradient["reduced"] + gradient["proposed"], zero2.state_nbytes]
    rows = [
        [f"rank {rank}", *(f"{count:,}" for count in counts)]
        for rank, counts in enumerate(built.comm.agree("bytes per rank", own))
    ]
    columns = ["bytes", "weights", "gradients", "slices in a step", "optimizer state"]
    return {"title": "memory", "columns": columns, "rows": rows}
