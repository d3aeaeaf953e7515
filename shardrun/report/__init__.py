"""All that shardrun shows: lines, tables, JSON documents, the screen of a training run. Nothing else prints."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardrun.report.reading import Reading
from shardrun.report.streams import flush, write
from shardrun.report.train_screen import TrainScreen
from shardrun.report.wording import CODES, SCHEMA_VERSION, event_lines, failure_lines, json_text, table_text, visible
from shardrun.run.outcome import Outcome

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "CODES",
    "SCHEMA_VERSION",
    "Reading",
    "TrainScreen",
    "error",
    "event_lines",
    "failure_lines",
    "json_document",
    "line",
    "outcome",
    "screen",
    "show",
    "table",
    "table_text",
    "visible",
]

_ENDLESS = 100_000  # columns


def line(text: str = "") -> None:
    """One line on stdout."""
    write(text, sys.stdout)


def error(text: str) -> None:
    """One line (or several) on stderr, after what came before on stdout."""
    flush(sys.stdout)
    write(text, sys.stderr)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout, as wide as its content."""
    line(table_text(title, columns, rows))


def show(parts: Iterable[RenderableType]) -> None:
    """Tables and texts of rich on stdout, a blank line between them; in colour on a terminal, plain elsewhere."""
    from rich.console import Console, Group
    from rich.text import Text

    width, _ = screen()
    console = Console(file=sys.stdout, width=width, soft_wrap=False)
    blocks = [Text("\n".join(map(visible, part.split("\n")))) if isinstance(part, str) else part for part in parts]
    for number, block in enumerate(blocks):
        with console.capture() as caught:
            console.print(Group(block), soft_wrap=isinstance(block, Text))
        text = "\n".join(row.rstrip() for row in caught.get().rstrip("\n").split("\n"))
        line(("\n" if number else "") + text)


def screen() -> tuple[int, bool]:
    """How many columns there are (without a terminal: as many as it takes), and whether lines can be drawn."""
    if sys.stdout is None or not sys.stdout.isatty():
        return _ENDLESS, True
    from rich.console import Console

    console = Console(file=sys.stdout)
    return console.width, console.encoding.startswith("utf")


def json_document(document: Mapping[str, Any]) -> None:
    """One JSON object on one line of stdout, with `schema_version`; NaN and infinities become strings."""
    line(json_text(document))


def outcome(result: Outcome, run_dir: Path, again: str, last: Path | None, *, json: bool) -> None:
    """The end of a run: nothing if all is done, else what happened, and the command `again` that goes on from `last`.

    With `json` one document on stdout says it for machines too.
    """
    code = result.exit_code
    if code == 75 and not json:
        line(f"go on with: {again}")
        line(f"exit code 75 ({CODES[75]})")
    elif code not in (0, 75):
        error("\n".join(failure_lines(result, run_dir, again, last)))
    if json:
        document: dict[str, Any] = {"event": "exit", "exit_code": code, "reason": result.reason, "again": again}
        if result.culprit is not None:
            document |= {"rank": result.culprit.rank, "step": result.culprit.status.step}
            if (cause := result.culprit.failure) is not None:
                document |= {"type": cause.type, "message": cause.message, "file": cause.file, "line": cause.line}
        json_document({**document, "last_checkpoint": last})
