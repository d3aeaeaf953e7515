"""`shardrun inspect-ckpt`: what a checkpoint, a run folder or a file of tensors holds; how two of them differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardrun import report
from shardrun.checkpoint.difference import diff
from shardrun.checkpoint.inspect import inspect
from shardrun.checkpoint.store import is_checkpoint, newest
from shardrun.cli.diff_view import diff_view
from shardrun.cli.inspect_view import checkpoint_view, loose_view, run_view
from shardrun.errors import CheckpointError, UsageError, VerificationError


def run(path: Path, *, verify: bool = False, stats: bool = False, other: Path | None = None, json: bool = False) -> int:
    """Show `path`, or in what it differs from `other`.

    0 if all that was looked at is sound (and the same), 3 if something is damaged, 4 if the two differ. CheckpointError
    if there is nothing to look at.
    """
    if other is not None and stats:
        raise UsageError("--stats tells of one checkpoint, --diff compares two; leave one of them out")
    if stats and not is_checkpoint(path) and (last := newest(path)) is not None:
        raise UsageError(f"--stats tells of one checkpoint, {path} is the folder of a run; its newest is {last.path}")
    with report.Reading() as meter:
        if other is None:
            found = inspect(path, verify=verify, stats=stats, meter=meter)
        else:
            found = diff(path, other, verify=verify, meter=meter)
    if json:
        report.json_document(found)
    else:
        _show(found)
    if not found["good"]:
        return CheckpointError.exit_code
    return VerificationError.exit_code if found.get("same") is False else 0


def _show(found: Mapping[str, Any]) -> None:
    width, unicode = report.screen()
    match found["kind"]:
        case "run":
            parts = run_view(found)
        case "diff":
            parts = diff_view(found)
        case _:
            view = loose_view if "tensors" in found else checkpoint_view
            parts = view(found, width=width, unicode=unicode)
    report.show(parts)
    if not found["good"]:
        report.error("\n".join(["damaged:", *(f"  {report.visible(line)}" for line in _problems(found))]))


def _problems(found: Mapping[str, Any]) -> list[str]:
    if found["kind"] == "run":
        return [line for one in found["checkpoints"] for line in one["problems"]]
    return list(found["problems"])
