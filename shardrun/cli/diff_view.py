"""What `inspect-ckpt --diff` shows on a screen: what the manifests say, which tensors differ, by how much and where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shardrun.checkpoint.difference import MODEL, STATE
from shardrun.cli.inspect_view import flat, how_many, plain_table, shape
from shardrun.cli.tensor_tree import Row

if TYPE_CHECKING:
    from rich.console import RenderableType

_MOST_DIFFERENCES = 40


def diff_view(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What differs between two checkpoints or files."""
    yield f"one    {found['one']}\nother  {found['other']}"
    if found["settings"]:
        rows = [[one["key"], flat(one["one"]), flat(one["other"])] for one in found["settings"]]
        yield plain_table(["what the manifests say", "one", "other"], rows)
    differing = found["differences"]
    if differing:
        rows = [_difference(row) for row in differing[:_MOST_DIFFERENCES]]
        yield plain_table(["tensor", "", "differing", ">max |a-b|", ">relative", "first", "one", "other"], rows)
        if len(differing) > _MOST_DIFFERENCES:
            yield f"... and {len(differing) - _MOST_DIFFERENCES:,} more; --json has all"
    for note in found["notes"]:
        yield f"note: {note}"
    tensors = sum(found["compared"].values())
    told = f"{how_many(tensors)} with {found['elements']:,} elements"
    if found["same"]:
        yield f"bit-identical: {told}"
    else:
        counts = ", ".join(f"{count:,} {_WHAT[what]}" for what, count in found["counts"].items())
        yield f"NOT identical: of {told}: {counts}"


_WHAT = {
    "same": "bit-identical",
    "values": "with other values",
    "dtype": "of another dtype",
    "shape": "of another shape",
    "only in one": "only in one",
    "only in other": "only in other",
    "unreadable": "unreadable",
}


def _difference(row: Row) -> list[str]:
    name = row["name"] if row["section"] in (MODEL, STATE) else f"{row['section']}: {row['name']}"
    if row["what"] in ("shape", "dtype"):
        sides = [shape(one) for one in row["shapes"]] if "shapes" in row else row["dtypes"]
    else:
        sides = row.get("left", ["", ""])
    if row.get("differing") is None:
        return [name, row["what"], "", "", "", "", *sides]
    first = row["first"] or {"index": "", "one": "", "other": ""}
    return [
        name,
        row["what"] if row["what"] != "dtype" else f"{sides[0]}, {sides[1]}",
        f"{row['differing']:,} of {row['elements']:,}",
        "?" if row["max_abs"] is None else f"{row['max_abs']:.3g}",
        "?" if row["relative"] is None else f"{row['relative']:.2g}",
        str(first["index"]),
        first["one"],
        first["other"],
    ]
