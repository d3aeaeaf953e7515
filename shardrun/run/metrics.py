"""metrics.jsonl: one row per window and per validation, in order, without gaps or repeats over stops and resumes.

Strict JSON: a number that is not finite is null.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

NAME = "metrics.jsonl"


class MetricsFile:
    """Appends rows; rank 0 only. A full disk loses rows, never the run: the first failure is returned as a warning."""

    def __init__(self, run_dir: Path, after_step: int, *, later: bool = False) -> None:
        """Open for going on after `after_step`: rows of later steps, which no checkpoint holds, are dropped.

        With `later` a checkpoint of a later step does hold them. They go aside then, until this start has saved: if it
        ends before it has, or is killed, they come back. Never raises OSError: `write` tells.
        """
        self.path = run_dir / NAME
        self._aside = self.path.with_suffix(".aside")
        self._file: FileIO | None = None
        self._trouble: str | None = None
        self._warned = False
        self.lacks_validation = False
        """Whether the file ends with the row of step `after_step` itself, so without its validation."""
        try:
            self._restore()
            self._cut(after_step, later)
            self._file = FileIO(self.path, "a")
        except OSError as error:
            self._trouble = error.strerror

    def write(self, row: Mapping[str, Any]) -> str | None:
        """Append one row; returns a warning the first time that it cannot be written."""
        if self._file is not None:
            try:
                self._append(self._file, _line(row).encode())
                return None
            except OSError as error:
                self._trouble = error.strerror
        if self._warned:
            return None
        self._warned = True
        return f"{self.path}: {self._trouble}; training goes on without metrics"

    def saved(self) -> None:
        """Call once a checkpoint is published: from now on the rows of this start are those of the run."""
        with suppress(OSError):
            self._aside.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; no row can follow."""
        with suppress(OSError):
            if self._file is not None:
                self._file.close()
            self._restore()

    @staticmethod
    def _append(file: FileIO, line: bytes) -> None:
        """The whole line or, on a full disk, nothing of it."""
        before = os.fstat(file.fileno()).st_size
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise

    def _cut(self, after_step: int, later: bool) -> None:
        """End the file before the first row of a later step, or before a last line that a kill cut."""
        if not self.path.exists():
            return
        keep, row = 0, None
        with self.path.open("rb") as file:
            for line in file:
                found = _parsed(line)
                if not line.endswith(b"\n") or (found is not None and _step(found) > after_step):
                    break
                keep, row = keep + len(line), found
            file.seek(keep)
            if later and file.peek(1):
                self._put_aside(keep, file)
        self.lacks_validation = row is not None and row.get("step") == after_step and "loss" in row
        os.truncate(self.path, keep)

    def _put_aside(self, keep: int, rest: BinaryIO) -> None:
        """Copy the rest of the file aside, behind a line that says where it was."""
        part = self._aside.with_suffix(".part")
        with part.open("wb") as file:
            file.write(b"%d\n" % keep)
            shutil.copyfileobj(rest, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self._aside)

    def _restore(self) -> None:
        """Put back what a start that never saved had put aside, in the place of its own rows."""
        if not self._aside.exists():
            return
        if not self.path.exists():  # somebody took it away, and with it the place of these rows
            self._aside.unlink()
            return
        with self._aside.open("rb") as aside, self.path.open("r+b") as file:
            at = int(aside.readline())
            file.seek(at)
            file.truncate()
            shutil.copyfileobj(aside, file)
            file.flush()
            os.fsync(file.fileno())
        self._aside.unlink()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows; lines that are none, such as a last one that was cut by a kill, are left out."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        return [row for line in file if (row := _parsed(line)) is not None]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _step(row: Mapping[str, Any]) -> int:
    step = row.get("step", 0)
    return step if isinstance(step, int) else 0


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: numbers of numpy and torch as plain ones, NaN and infinities as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if not isinstance(value, float) and hasattr(value, "item"):
        return plain(value.item())
    number = float(value)
    return number if math.isfinite(number) else None


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(plain(row), separators=(",", ":"), allow_nan=False) + "\n"
