"""What `inspect-ckpt` shows on a screen: tables and trees of what `inspect` and `diff` found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardrun import report
from shardrun.checkpoint.difference import index_of
from shardrun.checkpoint.inspect import SECTIONS
from shardrun.cli.tensor_tree import Column, Row, grown, tree_table

if TYPE_CHECKING:
    from rich.console import RenderableType

_MOST_HOLDERS = 4
_MOST_NAMED = 20
_LEFT = {
    "whole": "whole",
    "unverified": "unverified (all bytes are there, in a file that is damaged)",
    "partly": "partly there",
    "lost": "lost",
}


# ---- a run folder ----------------------------------------------------------------------------------------------------


def run_view(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    """A run folder: its checkpoints, newest first."""
    count = len(found["checkpoints"])
    yield f"run folder {found['path']}: {count} checkpoint{'s' * (count != 1)}, {size(found['bytes'])}"
    sound = "good" if found["verified"] else "complete"
    rows = [
        [
            one["name"],
            f"{one['step']}",
            age(one["age_s"]),
            size(one["bytes"]),
            str(one["world_size"] or "?"),
            "" if one["parent"] is None else f"after {one['parent']}",
            sound if one["good"] else "damaged",
        ]
        for one in found["checkpoints"]
    ]
    yield plain_table(["checkpoint", ">step", ">age", ">size", ">ranks", "saved", "state"], rows)
    if found["leftovers"]:
        yield f"left-overs of an interrupted save, removed by the next one: {len(found['leftovers'])}"
    if not found["verified"]:
        yield "sizes are checked; --verify reads every byte and checks the hashes"


# ---- a checkpoint, or plain files ------------------------------------------------------------------------------------


def checkpoint_view(found: Mapping[str, Any], *, width: int, unicode: bool) -> Iterator[RenderableType]:
    """A checkpoint with a manifest: what it is, its files, and trees of the model, the groups and the ranks' state."""
    yield f"checkpoint {found['path']}: step {found['step']}, {age(found['age_s'])} old, {size(found['bytes'])}"
    yield "\n".join(f"  {key:<13} {flat(found[key])}" for key in SECTIONS if found.get(key) is not None)
    roles = _roles(found["groups"])
    yield tree_table(
        "model", grown(found["model"], _dotted), _columns(found["model"], roles=roles), width=width, unicode=unicode
    )
    for name, group in found["groups"].items():
        optimizer = group.get("optimizer", {})
        if isinstance(optimizer, Mapping):  # who owns what is told beside each tensor
            optimizer = {key: value for key, value in optimizer.items() if key != "owners"}
        yield f"group {name}: {flat(optimizer)}"
        root = grown(group["state"], _parameter_and_key)
        yield tree_table(f"state of {name}", root, _columns(group["state"], held=True), width=width, unicode=unicode)
        if group["lost"]:
            yield f"nothing is left of the state of {', '.join(group['lost'])}"
    ranks = [{**row, "name": f"rank {one['rank']}/{row['name']}"} for one in found["ranks"] for row in one["tensors"]]
    if ranks:
        yield tree_table("state of the ranks", grown(ranks, _slashed), _columns(ranks), width=width, unicode=unicode)
    yield from _not_finite(
        [*found["model"], *(row for one in found["groups"].values() for row in one["state"]), *ranks]
    )
    yield from _files_and_rest(found)


def loose_view(found: Mapping[str, Any], *, width: int, unicode: bool) -> Iterator[RenderableType]:
    """Files without a manifest: each with the tree of its tensors."""
    what = f"checkpoint {found['path']}: step {found['step']}" if "step" in found else found["path"]
    yield f"{what}, {size(found['bytes'])}" + (", without a sound manifest" if "step" in found else "")
    for file in found["files"]:
        rows = [row for row in found["tensors"] if row["file"] == file["path"]]
        if rows:
            yield tree_table(file["path"], grown(rows, _dotted), _columns(rows), width=width, unicode=unicode)
        if file.get("metadata"):
            yield f"  metadata: {flat(file['metadata'])}"
    yield from _not_finite(found["tensors"])
    yield from _files_and_rest(found)


def _not_finite(rows: Iterable[Row]) -> Iterator[RenderableType]:
    """Where NaNs and infinities are."""
    bad = [row for row in rows if row.get("stats") and row["stats"]["nonfinite"]]
    lines = [
        f"{row['name']}: {row['stats']['nonfinite']:,} of {row['stats']['elements']:,} elements are not finite, "
        f"the first at {list(index_of(row['stats']['first_nonfinite'], tuple(row['shape'])))}"
        for row in bad[:_MOST_NAMED]
    ]
    if len(bad) > _MOST_NAMED:
        lines.append(f"... and {len(bad) - _MOST_NAMED:,} more tensors")
    if lines:
        yield "\n".join(lines)


def _files_and_rest(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    rows = [
        [one["path"], f"{one['bytes']:,}", f"{one['tensors']:,}", one["status"], _short(one.get("hash", ""))]
        for one in found["files"]
    ]
    yield plain_table(["file", ">bytes", ">tensors", "state", "hash"], rows)
    if not found["good"]:
        left = found["left"]
        good, every = len(left["good_files"]), len(left["good_files"]) + len(left["bad_files"])
        counts = [f"{count:,} {_LEFT[name]}" for name, count in left["tensors"].items() if count]
        yield f"what is left: {good} of {every} files; of the tensors " + (", ".join(counts) or "none")
    if not found["verified"] and found["kind"] == "checkpoint":
        yield "sizes are checked; --verify reads every byte and checks the hashes"


def _short(text: str) -> str:
    """ "<algorithm>:<hex>" as far as the eye compares it."""
    algorithm, colon, digits = text.partition(":")
    return algorithm + colon + digits[:12]


def _dotted(name: str) -> list[str]:
    return name.split(".")


def _slashed(name: str) -> list[str]:
    return name.split("/", 2)


def _parameter_and_key(name: str) -> list[str]:
    path, _, key = name.rpartition("/")
    return [*path.split("."), key]


def _roles(groups: Mapping[str, Any]) -> dict[str, str]:
    """Path -> the group that trains it, or "frozen"."""
    return {
        one["path"]: name if one["trainable"] else "frozen"
        for name, group in groups.items()
        for one in group["parameters"]
    }


def _columns(rows: Sequence[Row], *, roles: Mapping[str, str] | None = None, held: bool = False) -> list[Column]:
    def bytes_of(row: Row) -> str:
        return f"{row['bytes']:,}" if not row.get("alias_of") else ""

    def role(row: Row) -> str:
        return f"alias of {row['alias_of']}" if row["alias_of"] else (roles or {}).get(row["name"], "")

    damaged = any(row["left"] != "whole" for row in rows)
    found = [
        Column("dtype", lambda row: row["dtype"], goes=3),
        Column("shape", lambda row: shape(row["shape"]), lambda total: how_many(total["tensors"])),
        Column("bytes", bytes_of, lambda total: f"{total['bytes']:,}", right=True),
        *([Column("group", role)] if roles is not None else []),
        *([Column("held by", _holders, goes=2)] if held else []),
        *(_statistics() if any(row.get("stats") for row in rows) else []),
    ]
    if damaged:
        found.append(Column("left", lambda row: row["left"]))
    if not any("stats" in row for row in rows):
        found.append(Column("sha256", lambda row: row.get("sha256", "")[:12], goes=1))
    return found


def how_many(tensors: int) -> str:
    return f"{tensors:,} tensor{'s' * (tensors != 1)}"


def _statistics() -> Iterable[Column]:
    def figure(key: str, of: Mapping[str, Any]) -> str:
        stats = of.get("stats")
        value = stats and stats[key]
        return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    def zeros(of: Mapping[str, Any]) -> str:
        stats = of.get("stats")
        return f"{100 * stats['zeros'] / stats['elements']:.1f} %" if stats and stats["elements"] else ""

    def nonfinite(of: Mapping[str, Any]) -> str:
        stats = of.get("stats")
        return f"{stats['nonfinite']:,}" if stats and stats["nonfinite"] else ""

    for key in ("norm", "min", "max"):
        yield Column(key, lambda row, key=key: figure(key, row), lambda total, key=key: figure(key, total), right=True)  # type: ignore[misc]
    yield Column("zeros", zeros, zeros, right=True)
    yield Column("non-finite", nonfinite, nonfinite, right=True)


def _holders(row: Row) -> str:
    held = row["held_by"]
    if len(held) <= _MOST_HOLDERS:
        return "  ".join(f"rank {one['rank']} [{one['start']}, {one['stop']})" for one in held)
    return f"{len(held)} slices, ranks {held[0]['rank']} to {held[-1]['rank']}"


# ---- for the eye -----------------------------------------------------------------------------------------------------


def plain_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    """A table; a head that begins with ">" stands over a column of numbers."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for head in heads:
        table.add_column(head.removeprefix(">"), justify="right" if head[:1] == ">" else "left", overflow="fold")
    for row in rows:
        styles = {"damaged": "red", "bad": "red", "missing": "red", "good": "green"}
        table.add_row(*(Text(report.visible(cell), style=styles.get(cell, "")) for cell in row))
    return table


def shape(axes: Sequence[int]) -> str:
    """As torch shows it."""
    return "(" + ", ".join(map(str, axes)) + ")"


def flat(value: Any) -> str:
    """A section on one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {flat(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return "[" + ", ".join(f"({flat(one)})" if isinstance(one, Mapping) else flat(one) for one in value) + "]"
    return str(value)


def size(count: int) -> str:
    """A number of bytes for people."""
    amount = float(count)
    for unit in ("bytes", "KB", "MB", "GB"):
        if amount < 1000:
            return f"{count} bytes" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def age(seconds: int | None) -> str:
    """A time that has passed, for people."""
    if seconds is None:
        return "?"
    for count, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= count:
            return f"{seconds // count} {unit}"
    return f"{seconds} s"
