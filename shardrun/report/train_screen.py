"""The screen of a training run."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO, cast

from shardrun.report.streams import ROOM_MANY, ROOM_ONCE, SilentWhenGone, attach, detach, write
from shardrun.report.wording import event_lines, json_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_BEGAN = time.monotonic()  # among the first modules that a command loads


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
        attach(self._left_out)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
        detach()

    def _left_out(self, count: int) -> str:
        if self._json:
            return json_text({"event": "left_out", "lines": count}) + "\n"
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
            write(json_text(event), sys.stdout, room=ROOM_MANY if event["event"] == "step" else ROOM_ONCE)
        elif event["event"] == "step":
            self._show_step(event, lines)
        else:
            for text in lines:
                self._show(text)
        return lines

    def output(self, rank: int, text: str) -> None:
        """Show one line that the program of `rank` printed, marked with the rank."""
        if self._json:
            write(json_text({"event": "output", "rank": rank, "text": text}), sys.stdout, room=ROOM_MANY)
        else:
            self._show(f"[rank {rank}] {text}", room=ROOM_MANY)

    def _show(self, text: str, room: int = ROOM_ONCE) -> None:
        if self._progress is None:
            write(text, sys.stdout, room=room)
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
                self._show(text, room=ROOM_MANY)


def _progress_bar(total: int | None) -> tuple[Progress, TaskID]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    progress = Progress(
        BarColumn(bar_width=10, table_column=Column(min_width=10)),
        TextColumn("{task.fields[figures]}", markup=False, table_column=Column(no_wrap=True)),
        console=Console(file=cast(TextIO, SilentWhenGone(sys.stdout))),
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task = progress.add_task("train", total=total, figures="")
    progress.start()
    return progress, task
