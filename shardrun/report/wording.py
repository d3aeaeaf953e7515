"""The words for what a run tells: its events, its end and its failures, as plain lines; documents as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardrun.run.failure import named
from shardrun.run.outcome import Outcome, RankEnd

SCHEMA_VERSION = 1
_LONGEST_MESSAGE = 20  # lines
_LONGEST_LINE = 1000  # characters
CODES = {
    1: "training failed",
    2: "usage or config",
    3: "checkpoint missing, damaged or unfit",
    4: "verification found a difference",
    5: "environment or launch",
    6: "stopped on a non-finite value",
    75: "stopped after saving, safe to start again",
    130: "interrupted, nothing saved",
}


def visible(text: str) -> str:
    """`text`, which may come from a file of somebody else, with all escaped that a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


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
    lines.append(f"exit code {result.exit_code} ({CODES.get(result.exit_code, 'failed')})")
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


def json_text(document: Mapping[str, Any]) -> str:
    """One line of JSON with `schema_version`; NaN and infinities become strings."""
    return json.dumps({"schema_version": SCHEMA_VERSION, **_strict_json(document)}, allow_nan=False)


def _strict_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
