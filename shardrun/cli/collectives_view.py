"""What `bench --collectives` shows on a screen: a table for each world, and the faster way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardrun.cli.inspect_view import plain_table

if TYPE_CHECKING:
    from rich.console import RenderableType

_MIB = 1 << 20


def collectives_view(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The document of `bench.collectives.to_json`."""
    rows: Sequence[Mapping[str, Any]] = document["rows"]
    cores = "a device for each rank" if document["cores"] is None else f"{document['cores']} cores"
    yield f"{document['backend']} of torch {document['torch']}, {cores}; buckets of float32, whole ones in GB/s"
    yield "times are from the first rank that begins to the last that is done: median (least to most) of all rounds"
    for world_size in dict.fromkeys(row["world_size"] for row in rows):
        yield _table([row for row in rows if row["world_size"] == world_size])
    yield "\n".join(_agreements(rows))
    yield "\n".join(map(_faster, document["faster"]))


def _table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """One world: a line for each collective, three columns for each size."""
    sizes = sorted({row["bytes"] for row in rows if row["bytes"]})
    found = {(row["name"], row["bytes"]): row for row in rows}
    heads = [f"{rows[0]['world_size']} ranks"]
    for nbytes in sizes:
        heads += [f">{nbytes / _MIB:g} MiB ms", ">(least to most)", ">GB/s"]
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows if row["bytes"]):
        cells = [name]
        for nbytes in sizes:
            row = found[name, nbytes]
            ms, least, most = (_ms(row[key]) for key in ("seconds", "least", "most"))
            cells += [ms, f"({least} to {most})", f"{nbytes / row['seconds'] / 1e9:.2f}"]
        lines.append(cells)
    return plain_table(heads, lines)


def _agreements(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        if not row["bytes"]:
            us, least, most = (f"{1e6 * row[key]:,.0f}" for key in ("seconds", "least", "most"))
            ranks = f"{row['world_size']} ranks, after the last has come to it"
            yield f"an {row['name']} of {ranks}: {us} us ({least} to {most})"


def _faster(one: Mapping[str, Any]) -> str:
    others = ", ".join(f"{way} takes {times:.2f} x as long" for way, times in one["times"].items())
    return (
        f"{one['world_size']} ranks, {one['bytes'] / _MIB:g} MiB: {one['way']} is the fastest to reduce and gather, in "
        f"{_ms(one['seconds'])} ms" + (f"; {others}" if others else "")
    )


def _ms(seconds: float) -> str:
    """Milliseconds in three digits."""
    ms = 1000 * seconds
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.3g}"
