"""What `plan` shows on a screen: groups, bytes per rank, bytes on the wire, time of a step, files of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardrun.cli.inspect_view import plain_table, size

if TYPE_CHECKING:
    from rich.console import RenderableType

_MOST_KINDS = 6
"""Kinds of ranks that are shown."""
_MOST_RANGES = 4


def plan_view(planned: Mapping[str, Any]) -> Iterator[RenderableType]:
    """A plan as `Planned.to_json` gives it."""
    count, axes = planned["world_size"], planned["axes"]
    ranks = f"{count:,} rank{'s' * (count != 1)}"
    told = f" ({' x '.join(f'{name} {places}' for name, places in axes.items())})" if axes else ""
    yield f"plan for {ranks}{told}; nothing was started, and no memory taken for the model"
    yield _groups(planned["groups"])
    yield from _ranks(planned["ranks"])
    yield from _wire(planned)
    if "step_time" in planned:
        yield from _step_time(planned["step_time"])
    yield _files(planned)
    yield "\n".join(_whole(planned))
    for note in planned["notes"]:
        yield f"note: {note}"


def _groups(groups: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Each replica set in a line, or where they are many, those in one that differ in their numbers alone."""
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for one in groups:
        told = (one["strategy"], one["gradients"], one["tensors"], one["elements"])
        form = (one["name"], " + ".join(one["optimizers"]), *told)
        alike.setdefault((*form, len(one["ranks"]) if len(groups) > _MOST_KINDS else one["record"]), []).append(one)
    rows = []
    for (_, optimizers, strategy, gradients, tensors, elements, _), sets in alike.items():
        first, more = sets[0], len(sets) - 1
        name = f"{first['record']} and {more:,} more" if more else first["record"]
        ranks = f"{len(first['ranks']):,} each" if more else ranges(first["ranks"])
        rows.append([name, optimizers, strategy, gradients, ranks, f"{tensors:,}", f"{elements:,}"])
    return plain_table(["group", "optimizer", "strategy", "gradients", "ranks", ">tensors", ">elements"], rows)


def _ranks(ranks: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """Memory; ranks that hold the same in one line."""
    kinds = _alike(ranks, ("pending", "in_step", "state"))
    rows = []
    for numbers, one in kinds[:_MOST_KINDS]:
        first = [ranges(numbers), size(one["weights"])]
        for name, held in one["groups"].items():
            counts = [held["pending"], held["in_step"], held["state"]]
            rows.append([first[0], name, first[1], *map(size, counts)])
            first = ["", ""]
        if len(one["groups"]) > 1:
            sums = [sum(h[key] for h in one["groups"].values()) for key in ("pending", "in_step", "state")]
            rows.append(["", "together", "", *map(size, sums)])
    heads = ["memory of rank", "group", ">weights", ">gradients", ">slices in a step", ">optimizer state"]
    yield plain_table(heads, rows)
    if left := kinds[_MOST_KINDS:]:
        count = sum(len(numbers) for numbers, _ in left)
        yield f"... and {count:,} more ranks of {len(left):,} kinds; --json has all"


def _wire(planned: Mapping[str, Any]) -> Iterator[RenderableType]:
    if planned["world_size"] == 1:
        yield "one rank sends nothing"
        return
    sent = any(held["reduce_sent"] for rank in planned["ranks"] for held in rank["groups"].values())
    keys = ("reduce_sent", "gather_sent") if sent else ("reduce_read", "gather_read")
    kinds = _alike(planned["ranks"], keys)
    rows = [
        [ranges(numbers) if not number else "", name, *(size(held[key]) for key in keys)]
        for numbers, one in kinds[:_MOST_KINDS]
        for number, (name, held) in enumerate(one["groups"].items())
    ]
    what = "sent in a step by rank" if sent else "read of other ranks in a step by rank"
    yield plain_table([what, "group", ">reduce", ">gather"], rows)
    if left := kinds[_MOST_KINDS:]:
        yield f"... and {sum(len(numbers) for numbers, _ in left):,} more ranks; --json has all"
    rounds, each = planned["rounds_per_step"], planned["bytes_per_round"]
    yield f"by {planned['transport']}; and {rounds} rounds of {each} bytes for agreement, norm, vote and log"


def _step_time(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    rows = [[term["name"], f"{1000 * term['seconds']:,.2f}", term["of"]] for term in found["terms"]]
    known = any(term["name"] == "compute" for term in found["terms"])
    rows.append(["step" if known else "beside compute", f"{1000 * found['seconds']:,.2f}", "one after the other"])
    yield plain_table(["predicted, all ranks on one host", ">ms", "of"], rows)
    for note in found["notes"]:
        yield f"note: {note}"


def _files(planned: Mapping[str, Any]) -> RenderableType:
    rows = []
    for role, what in (("model", "model"), ("record", "records"), ("state", "states of ranks")):
        sizes = [file["bytes"] for file in planned["files"] if file["role"] == role]
        rows.append([what, f"{len(sizes):,}", size(min(sizes)), size(max(sizes)), size(sum(sizes))])
    rows.append(["together", f"{len(planned['files']):,}", "", "", size(planned["checkpoint_bytes"])])
    return plain_table(["a checkpoint", ">files", ">smallest", ">largest", ">all"], rows)


def _whole(planned: Mapping[str, Any]) -> Iterator[str]:
    """What every rank has whole, however many there are."""
    ranks, kept = planned["ranks"], {group["name"] for group in planned["groups"] if group["gradients"] == "kept"}
    most = {key: max(rank[key] for rank in ranks) for key in ("weights", "frozen", "buffers")}
    pending = max(sum(held["pending"] for name, held in rank["groups"].items() if name in kept) for rank in ranks)
    frozen = f" ({size(most['frozen'])} of them frozen)" if most["frozen"] else ""
    buffers = f", buffers {size(most['buffers'])}" if most["buffers"] else ""
    weights = f"weights {size(most['weights'])}{frozen}"
    gradients = f", gradients {size(pending)}" if kept else ""
    yield f"whole on each rank, not sharded: {weights}{gradients}{buffers}"
    left_out = "activations, gradients as backward makes them, scratch of kernels, what the recipe itself sends"
    yield f"not in it: {left_out}, and the checkpoint's manifest"


def _alike(ranks: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[tuple[list[int], Mapping[str, Any]]]:
    """Ranks that look alike under `keys` in every group, and in their weights: their numbers, and one of them."""
    kinds: dict[tuple[Any, ...], tuple[list[int], Mapping[str, Any]]] = {}
    for rank in ranks:
        held = [(name, *(size(one[key]) for key in keys)) for name, one in rank["groups"].items()]
        kinds.setdefault((size(rank["weights"]), *held), ([], rank))[0].append(rank["rank"])
    return list(kinds.values())


def ranges(numbers: Sequence[int]) -> str:
    """Numbers in rising order in a few words: "0 to 3, 6, 8 to 11"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    told = [f"{first}" if first == last else f"{first} to {last}" for first, last in found[:_MOST_RANGES]]
    more = len(numbers) - sum(last - first + 1 for first, last in found[:_MOST_RANGES])
    return ", ".join(told) + (f" and {more:,} more" if more else "")
