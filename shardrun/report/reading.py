"""The bar of a file that is being read."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO, cast

from shardrun.checkpoint.contents import Meter
from shardrun.report.streams import SilentWhenGone

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


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

    console = Console(file=cast(TextIO, SilentWhenGone(sys.stderr)))
    columns = (BarColumn(bar_width=30), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    progress = Progress("reading", *columns, console=console, transient=True)
    progress.start()
    return progress, progress.add_task("reading", total=None)
