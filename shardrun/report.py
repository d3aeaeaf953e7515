"""All that shardrun shows: lines, tables, JSON documents, the screen of a training run. Nothing else prints.

A reader that goes away (closed pipe, full disk, hung-up terminal) never ends a run: its stream falls silent. A reader
that pauses never holds one up: while a TrainScreen is open, all is written by threads that alone wait for it.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO, cast

from shardrun.checkpoint.contents import Meter
from shardrun.run.failure import named
from shardrun.run.outcome import Outcome, RankEnd
from shardrun.run.outlet import Outlet

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress, TaskID

SCHEMA_VERSION = 1
_BEGAN = time.monotonic()  # among the first modules that a command loads
_LONGEST_MESSAGE = 20  # lines
_LONGEST_LINE = 1000  # characters
_ENDLESS = 100_000  # columns
# Bytes that may wait for a reader that pauses: of what is told once, of steps and of what the ranks print (the logs
# have both), and of frames of a bar, which are stale a moment later.
_ROOM_ONCE, _ROOM_MANY, _ROOM_BAR = 16 << 20, 4 << 20, 1 << 16
_outlets: dict[int, Outlet] = {}
# The threads stay behind in the parent.
os.register_at_fork(after_in_child=_outlets.clear)
_CODES = {
    1: "training failed",
    2: "usage or config",
    3: "checkpoint missing, damaged or unfit",
    4: "verification found a difference",
    5: "environment or launch",
    6: "stopped on a non-finite value",
    75: "stopped after saving, safe to start again",
    130: "interrupted, nothing saved",
}


def line(text: str = "") -> None:
    """One line on stdout."""
    _write(text, sys.stdout)


def error(text: str) -> None:
    """One line (or several) on stderr, after what came before on stdout."""
    if (before := _outlets.get(id(sys.stdout))) is not None:
        before.flush()
    _write(text, sys.stderr)


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


def visible(text: str) -> str:
    """`text`, which may come from a file of somebody else, with all escaped that a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def screen() -> tuple[int, bool]:
    """How many columns there are (without a terminal: as many as it takes), and whether lines can be drawn."""
    if sys.stdout is None or not sys.stdout.isatty():
        return _ENDLESS, True
    from rich.console import Console

    console = Console(file=sys.stdout)
    return console.width, console.encoding.startswith("utf")


class Reading(Meter):
    """A bar of the bytes that are being read, on stderr while that is a terminal; a context manager."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._total = self._done = 0

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *error: object) -> None:
        self._take_down()

    def _take_down(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def expect(self, nbytes: int) -> None:
        """So many more are to come; the bar appears with the first of them."""
        self._total += nbytes
        if self._progress is None and self._total > self._done and sys.stderr is not None and sys.stderr.isatty():
            self._progress, self._task = _reading_bar()
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, total=self._total, completed=self._done)

    def read(self, nbytes: int) -> None:
        """So many have come; the bar is gone while none are expected."""
        self._done += nbytes
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, nbytes)
            if self._done >= self._total:
                self._take_down()


def _reading_bar() -> tuple[Progress, TaskID]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(file=cast(TextIO, _SilentWhenGone(sys.stderr)))
    columns = (BarColumn(bar_width=30), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    progress = Progress("reading", *columns, console=console, transient=True)
    progress.start()
    return progress, progress.add_task("reading", total=None)


def json_document(document: Mapping[str, Any]) -> None:
    """One JSON object on one line of stdout, with `schema_version`; NaN and infinities become strings."""
    line(_json_text(document))


def table_text(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The text of `table`: cells left-aligned under their heads, numbers right-aligned, nothing wrapped or cut."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, (head, *(row[i] for row in cells)))) for i, head in enumerate(columns)]
    right = [
        bool(rows) and all(isinstance(row[i], int | float) and not isinstance(row[i], bool) for row in rows)
        for i in range(len(columns))
    ]

    def aligned(row: Sequence[str]) -> str:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        return ("  " + "  ".join(padded)).rstrip()

    rule = "  " + "  ".join("-" * width for width in widths)
    return "\n".join([title, aligned(columns), rule, *map(aligned, cells)])


def outcome(result: Outcome, run_dir: Path, again: str, last: Path | None, *, json: bool) -> None:
    """The end of a run: nothing if all is done, else what happened, and the command `again` that goes on from `last`.

    With `json` one document on stdout says it for machines too.
    """
    code = result.exit_code
    if code == 75 and not json:
        line(f"go on with: {again}")
        line(f"exit code 75 ({_CODES[75]})")
    elif code not in (0, 75):
        error("\n".join(failure_lines(result, run_dir, again, last)))
    if json:
        document: dict[str, Any] = {"event": "exit", "exit_code": code, "reason": result.reason, "again": again}
        if result.culprit is not None:
            document |= {"rank": result.culprit.rank, "step": result.culprit.status.step}
            if (cause := result.culprit.failure) is not None:
                document |= {"type": cause.type, "message": cause.message, "file": cause.file, "line": cause.line}
        json_document({**document, "last_checkpoint": last})


def failure_lines(result: Outcome, run_dir: Path, again: str, last: Path | None) -> list[str]:
    """One screen: what failed where, the true cause once, the other ranks in a line each, where to look, what to do."""
    lines = [_harmless(result.reason)]
    culprit = result.culprit
    if culprit is not None:
        lines += _cause_lines(culprit)
        others: dict[str, list[int]] = {}
        for end in result.ends:
            if end is not culprit:
                others.setdefault(_other(end, culprit), []).append(end.rank)
        for text, ranks in others.items():
            lines.append(_harmless(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"))
        lines.append(f"log:             {run_dir / 'logs' / f'rank-{culprit.rank}.log'}")
    lines.append(f"last checkpoint: {last if last is not None else 'none yet'}")
    way_on = "go on with:" if last is not None else "start again:"
    lines.append(f"{'once mended:' if result.exit_code == 2 else way_on:<16} {again}")
    lines.append(f"exit code {result.exit_code} ({_CODES.get(result.exit_code, 'failed')})")
    return lines


def _cause_lines(culprit: RankEnd) -> list[str]:
    cause = culprit.failure
    if cause is None:
        return []
    if cause.code is not None:  # the reason has it
        message = [f"SystemExit in phase {cause.phase}"]
    else:
        message = (cause.message if cause.expected else named(cause)).splitlines() or [cause.type]
    if len(message) > _LONGEST_MESSAGE:
        message = [*message[:_LONGEST_MESSAGE], f"... {len(message) - _LONGEST_MESSAGE} more lines in the log"]
    frames = [] if cause.expected else [f"  at {frame}" for frame in reversed(cause.frames)]
    if cause.file is not None and frames and not frames[0].startswith(f"  at {cause.file}:{cause.line} "):
        frames.insert(0, f"  at {cause.file}:{cause.line}")  # a syntax error lies where no frame is
    return [_harmless(f"  {text}") for text in message] + [f"  {frame}" for frame in frames]


def _other(end: RankEnd, culprit: RankEnd) -> str:
    if end.done:
        return "had finished"
    if end.lost:
        return "gone with its host" if end.host == culprit.host else f"on {end.host}: {end.lost}"
    if end.failure is None:
        return "ended with it"
    if culprit.failure is not None and _impersonal(end) == _impersonal(culprit):
        return "the same error"
    if end.follows:
        return f"freed by it ({end.failure.phase} of step {end.failure.step})"
    return named(end.failure).splitlines()[0]


def _harmless(text: str) -> str:
    """One line as a terminal may have it: control characters are spelled out, and its end is cut if it is endless."""
    shown = "".join(letter if letter.isprintable() or letter == "\t" else ascii(letter)[1:-1] for letter in text)
    rest = len(shown) - _LONGEST_LINE
    return shown if rest <= 0 else f"{shown[:_LONGEST_LINE]}... {rest:,} more characters in the log"


def _impersonal(end: RankEnd) -> str:
    """The message of its error without the rank that it happened on."""
    return "" if end.failure is None else end.failure.message.replace(f"on rank {end.rank}:", "on this rank:")


def event_lines(event: Mapping[str, Any]) -> list[str]:
    """The plain lines that one event of a run reads as; the screen and the log of the rank show the same ones."""
    match event["event"]:
        case "start":
            ranks, first, total = event["world_size"], event["first_step"], event["total_steps"]
            over = f" over {event['transport']}" if ranks > 1 and event["backend"] == "gloo" else ""
            head = f"{ranks} rank{'s' if ranks > 1 else ''} on {event['device']} ({event['backend']}{over}), "
            if total is None:
                head += f"from step {first + 1}"
            else:
                head += f"steps {first + 1} to {total}" if first < total else f"all {total} steps done"
            tables = [table_text(t["title"], t["columns"], t["rows"]) for t in event.get("tables", ())]
            return "\n".join([head, *tables]).splitlines()
        case "resumed":
            return [f"resumed at step {event['step']} from {event['path']}"]
        case "step":
            return [f"step {_of(event)}  {_figures(event)}"]
        case "eval":
            shown = {key: value for key, value in event.items() if key not in ("event", "rank", "step")}
            figures = [f"{key} {_short(value)}" for key, value in shown.items() if value is not None]
            return [f"eval at step {event['step']}: {', '.join(figures)}"]
        case "checkpoint":
            return _checkpoint_lines(event)
        case "warning":
            return [f"[rank {event.get('rank', 0)}] warning: {text}" for text in str(event["text"]).splitlines()]
        case "stopping":
            return [f"{event['signal']}: finishing the step and saving; Ctrl-C (again) stops now without saving"]
        case "stopped":
            return [f"stopped at step {event['step']}, saved as {event['path']}"]
        case "finished" if event.get("already"):
            return [f"already finished at step {event['step']}: nothing to do"]
        case "finished":
            return [f"finished at step {event['step']}"]
        case _:
            return str(event.get("text", "")).splitlines()


def _checkpoint_lines(event: Mapping[str, Any]) -> list[str]:
    each, most = event["bytes"], event.get("most")
    lines = [f"saved step {event['step']}: {event['path']} ({_bytes(each)}, {_short(event['seconds'])} s)"]
    if most is not None:
        enough = "" if event["fits"] >= most - 1 else ": NOT enough; free some, or lower checkpoint.keep"
        lines.append(
            f"disk: {_bytes(each)} for each of up to {most} checkpoints that stand at a time, "
            f"and there is room for {event['fits']:,} more{enough}"
        )
    return lines


class TrainScreen:
    """The screen of one training run, fed with the events and the output lines of its ranks.

    A live progress bar on a terminal, plain lines elsewhere; with `json` one JSON object per line on stdout and nothing
    else there. `steps=False` leaves the step lines out. Use as a context manager: leaving it takes the bar down and
    waits a little for a reader that pauses; inside, nothing that is shown is ever waited for.
    """

    def __init__(self, *, json: bool = False, steps: bool = True) -> None:
        self._json = json
        self._steps = steps
        self._live = steps and not json and sys.stdout is not None and sys.stdout.isatty()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._first_step: tuple[int, float] | None = None
        self._steps_before = 0

    def __enter__(self) -> TrainScreen:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or no file at all
                _outlets[id(stream)] = Outlet(stream, self._left_out, partial(_mute, stream))
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
        while _outlets:
            _outlets.popitem()[1].close()

    def _left_out(self, count: int) -> str:
        if self._json:
            return _json_text({"event": "left_out", "lines": count}) + "\n"
        return f"... {count} lines left out while nobody read them; the logs have them\n"

    def close(self) -> None:
        """Take the bar down; later lines come out plain."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._live = False

    def event(self, rank: int, event: Mapping[str, Any]) -> list[str]:
        """Show one event of `rank`; returns its plain lines, which belong into the log of that rank as well.

        What happens to all ranks is told by the first; of the others only warnings are shown.
        """
        event = {"rank": rank, **event}
        if event["event"] == "start":
            self._steps_before = event["first_step"]
        elif event["event"] == "step":
            event = {"since_start_s": self._since_start_s(event), "eta_s": self._eta_s(event), **event}
        lines = event_lines(event)
        if rank != 0 and event["event"] != "warning":
            return lines
        if self._json:
            _write(_json_text(event), sys.stdout, room=_ROOM_MANY if event["event"] == "step" else _ROOM_ONCE)
        elif event["event"] == "step":
            self._show_step(event, lines)
        else:
            for text in lines:
                self._show(text)
        return lines

    def output(self, rank: int, text: str) -> None:
        """Show one line that the program of `rank` printed, marked with the rank."""
        if self._json:
            _write(_json_text({"event": "output", "rank": rank, "text": text}), sys.stdout, room=_ROOM_MANY)
        else:
            self._show(f"[rank {rank}] {text}", room=_ROOM_MANY)

    def _show(self, text: str, room: int = _ROOM_ONCE) -> None:
        if self._progress is None:
            _write(text, sys.stdout, room=room)
        else:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _since_start_s(self, event: Mapping[str, Any]) -> float | None:
        """Seconds from the start of the command to the end of the very first step that it made."""
        is_first = self._first_step is None and event["step"] == self._steps_before + 1
        return time.monotonic() - _BEGAN if is_first else None

    def _eta_s(self, event: Mapping[str, Any]) -> float | None:
        """Seconds to the end at the pace since the first step seen, saves and validations counted in."""
        now, step, total = time.monotonic(), event["step"], event.get("total_steps")
        if self._first_step is None:
            self._first_step = (step, now)
        first, since = self._first_step
        return None if total is None or step == first else (now - since) / (step - first) * (total - step)

    def _show_step(self, event: Mapping[str, Any], lines: list[str]) -> None:
        if self._live:
            if self._progress is None:
                self._progress, self._task = _progress_bar(event.get("total_steps"))
            assert self._task is not None
            self._progress.update(self._task, completed=event["step"], figures=lines[0])
        elif self._steps:
            for text in lines:
                self._show(text, room=_ROOM_MANY)


def _progress_bar(total: int | None) -> tuple[Progress, TaskID]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    progress = Progress(
        BarColumn(bar_width=10, table_column=Column(min_width=10)),
        TextColumn("{task.fields[figures]}", markup=False, table_column=Column(no_wrap=True)),
        console=Console(file=cast(TextIO, _SilentWhenGone(sys.stdout))),
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task = progress.add_task("train", total=total, figures="")
    progress.start()
    return progress, task


class _SilentWhenGone(io.TextIOBase):
    """A terminal that may hang up: writes to it never raise. rich writes from a thread of its own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        _write(text, self._stream, end="", room=_ROOM_BAR)
        return len(text)

    def flush(self) -> None:
        """Every write is flushed."""

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def _write(text: str, stream: TextIO | None, end: str = "\n", room: int = _ROOM_ONCE) -> None:
    if stream is None:  # the program was started with this stream closed
        return
    if (outlet := _outlets.get(id(stream))) is not None:
        outlet.put(text + end, room)
        return
    try:
        try:
            stream.write(text + end)
        except UnicodeEncodeError:
            stream.write(text.encode("ascii", "backslashreplace").decode() + end)
        stream.flush()
    except (OSError, ValueError):
        _mute(stream)


def _mute(stream: TextIO) -> None:
    # What is left in the stream's buffer would raise once more when the interpreter closes it.
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _of(event: Mapping[str, Any]) -> str:
    total = event.get("total_steps")
    return f"{event['step']}/{total}" if total else str(event["step"])


def _figures(event: Mapping[str, Any]) -> str:
    """The figures of a step event; what an event does not carry is left out."""
    shown: dict[str, tuple[str, Callable[[Any], str]]] = {
        "epoch": ("epoch {}", str),
        "loss": ("loss {}", lambda v: f"{v:.4f}"),
        "lr": ("lr {}", lambda v: f"{v:.3g}"),
        "grad_norm": ("norm {}", lambda v: f"{v:.4g}"),
        "tokens_per_s": ("{} tok/s", lambda v: f"{v:,.0f}"),
        "memory_mb": ("{} MB", lambda v: f"{v:.0f}"),
        "since_start_s": ("{} s after the start", lambda v: f"{v:.1f}"),
        "eta_s": ("eta {}", _clock),
    }
    parts = [frame.format(show(event[key])) for key, (frame, show) in shown.items() if event.get(key) is not None]
    if reason := event.get("skipped"):
        parts.append("skipped" if reason is True else f"skipped ({reason})")
    return "  ".join(parts)


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def _json_text(document: Mapping[str, Any]) -> str:
    return json.dumps({"schema_version": SCHEMA_VERSION, **_strict_json(document)}, allow_nan=False)


def _strict_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
