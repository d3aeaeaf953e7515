"""RUN_DIR/exit.json: how the last start of a run ended. Under torchrun it is the only place that has the exit code."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardrun.run.outcome import Outcome

NAME = "exit.json"


def write_exit(run_dir: Path, outcome: Outcome) -> None:
    """Write the end of this start; a folder that cannot be written to is no error of the run."""
    document: dict[str, Any] = {"exit_code": outcome.exit_code, "reason": outcome.reason, "time": time.time()}
    if outcome.culprit is not None:
        cause, place = outcome.culprit.failure, outcome.culprit.status
        document |= {"rank": outcome.culprit.rank}
        if outcome.culprit.host:
            document |= {"host": outcome.culprit.host}
        if not outcome.culprit.lost:
            document |= {"step": place.step, "phase": place.phase}
        if cause is not None:
            document |= {"type": cause.type, "message": cause.message, "file": cause.file, "line": cause.line}
    _replace(run_dir, json.dumps(document, indent=1).encode() + b"\n", None)


def forget_exit(run_dir: Path) -> Callable[[], None] | None:
    """Remove what an earlier start left: one that is killed has no code, and must not show another's.

    To be called by the owner of the folder. If the file said 0, returns what puts it back as it was.
    """
    path = run_dir / NAME
    try:
        content, status = path.read_bytes(), path.stat()
        path.unlink()
    except OSError:
        return None
    try:
        said = json.loads(content)["exit_code"]
    except (ValueError, KeyError, TypeError):
        return None
    return (lambda: _replace(run_dir, content, (status.st_atime_ns, status.st_mtime_ns))) if said == 0 else None


def _replace(run_dir: Path, content: bytes, times: tuple[int, int] | None) -> None:
    part = run_dir / f"{NAME}.{os.getpid()}"
    with contextlib.suppress(OSError):
        part.write_bytes(content)
        if times is not None:
            os.utime(part, ns=times)
        part.replace(run_dir / NAME)
