"""Tensors as a tree of their dotted names, and beside it what is known of each; as wide as its content."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardrun import report

if TYPE_CHECKING:
    from rich.table import Table

Row = Mapping[str, Any]


@dataclass
class Branch:
    """A part of a name, with what comes below it; a leaf has the row of a tensor."""

    row: Row | None = None
    below: dict[str, Branch] = field(default_factory=dict)

    def leaves(self) -> Iterator[Row]:
        """The rows of all tensors below."""
        if self.row is not None:
            yield self.row
        for branch in self.below.values():
            yield from branch.leaves()


@dataclass(frozen=True)
class Column:
    """A column beside the names. `of_leaf` and `of_many` give its text for a tensor and for a branch's totals; where
    the screen is narrow, columns go in the order of `goes` (0: it stays)."""

    head: str
    of_leaf: Callable[[Row], str]
    of_many: Callable[[Row], str] = lambda total: ""
    right: bool = False
    goes: int = 0


def grown(rows: Sequence[Row], parts: Callable[[str], Sequence[str]]) -> Branch:
    """The tree of `rows` by name; `parts` cuts a name."""
    root = Branch()
    for row in rows:
        at = root
        for part in parts(row["name"]):
            at = at.below.setdefault(part, Branch())
        at.row = row
    return root


def tree_table(title: str, root: Branch, columns: Sequence[Column], *, width: int, unicode: bool = True) -> Table:
    """A table of the tree, at most `width` wide if leaving out columns can do it. The first line has the totals."""
    guides = ("├─ ", "└─ ", "│  ") if unicode else ("|- ", "`- ", "|  ")
    lines = [(title, root), *_lines(root, "", guides)]
    cells = [
        [
            report.visible(text)
            for text in (
                label,
                *(column.of_leaf(at.row) if at.row else column.of_many(totals(at.leaves())) for column in columns),
            )
        ]
        for label, at in lines
    ]
    kept = [number for number, column in enumerate(columns) if any(line[number + 1] for line in cells)]
    while _width(columns, kept, cells) > width and any(columns[number].goes for number in kept):
        kept.remove(min((n for n in kept if columns[n].goes), key=lambda n: columns[n].goes))
    return _table(columns, kept, cells, [at.row is None for _, at in lines])


def _lines(branch: Branch, prefix: str, guides: tuple[str, str, str]) -> Iterator[tuple[str, Branch]]:
    below = sorted(branch.below.items(), key=lambda item: _natural(item[0]))
    for number, (label, at) in enumerate(below):
        last = number == len(below) - 1
        while at.row is None and len(at.below) == 1:  # a part alone needs no line of its own
            ((part, at),) = at.below.items()
            label = f"{label}.{part}"
        yield prefix + guides[1 if last else 0] + label, at
        yield from _lines(at, prefix + ("   " if last else guides[2]), guides)


def _natural(label: str) -> tuple[int, int, str]:
    """Numbered blocks in the order of their numbers."""
    return (0, int(label), "") if label.isdecimal() else (1, 0, label)


def _width(columns: Sequence[Column], kept: Sequence[int], cells: Sequence[Sequence[str]]) -> int:
    names = max(len(line[0]) for line in cells)
    others = [max(len(columns[n].head), *(len(line[n + 1]) for line in cells)) for n in kept]
    return names + sum(width + 2 for width in others)


def _table(
    columns: Sequence[Column], kept: Sequence[int], cells: Sequence[Sequence[str]], branches: Sequence[bool]
) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for number in kept:
        column = columns[number]
        table.add_column(column.head, justify="right" if column.right else "left", no_wrap=True)
    for place, (line, is_branch) in enumerate(zip(cells, branches, strict=True)):
        style = "bold" if place == 0 else "cyan" if is_branch else ""
        beside = [Text(line[number + 1], style="dim" if is_branch and place else "") for number in kept]
        table.add_row(Text(line[0], style=style), *beside)
    return table


def totals(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Tensors and bytes of some rows together, and their statistics where they have any; ties count once."""
    own = [row for row in rows if row["alias_of"] is None]
    found: dict[str, Any] = {"tensors": len(own), "bytes": sum(row["bytes"] for row in own)}
    stats = [row["stats"] for row in own if row.get("stats")]
    if stats:
        known = {key: [one[key] for one in stats if one[key] is not None] for key in ("min", "max")}
        found["stats"] = {
            "elements": sum(one["elements"] for one in stats),
            "norm": math.sqrt(sum(one["norm"] ** 2 for one in stats)),
            "min": min(known["min"], default=None),
            "max": max(known["max"], default=None),
            "zeros": sum(one["zeros"] for one in stats),
            "nonfinite": sum(one["nonfinite"] for one in stats),
        }
    return found
