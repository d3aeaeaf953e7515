"""metrics.jsonl: one row per window and per validation, in order, without gaps or repeats over stops and resumes.

Strict JSON: a number that is not finite is null.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "metrics.jsonl"


class MetricsFile:
    """Appends rows; rank 0 only. A full disk loses rows, never the run: the first failure is returned as a warning."""

    def __init__(self, run_dir: Path, after_step: int) -> None:
        """Open for going on after `after_step`: rows of later steps, which no checkpoint holds, are dropped."""
        self.path = run_dir / NAME
        kept = [row for row in read_rows(self.path) if row.get("step", 0) <= after_step] if after_step else []
        rewritten = self.path.with_suffix(".tmp")
        rewritten.write_text("".join(_line(row) for row in kept))
        os.replace(rewritten, self.path)
        self._file = self.path.open("a", buffering=1)
        self._warned = False

    def write(self, row: dict[str, Any]) -> str | None:
        """Append one row; returns a warning the first time that it cannot be written."""
        try:
            self._file.write(_line(row))
        except OSError as error:
            if not self._warned:
                self._warned = True
                return f"{self.path}: {error.strerror}; training goes on without metrics"
        return None

    def close(self) -> None:
        """Close the file; no row can follow."""
        self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows; a last line that was cut by a kill is left out."""
    rows: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


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


def _line(row: dict[str, Any]) -> str:
    return json.dumps(plain(row), separators=(",", ":"), allow_nan=False) + "\n"
