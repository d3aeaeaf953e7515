"""`shardrun inspect-ckpt`: what a checkpoint or a run folder holds, on one screen or as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardrun import report
from shardrun.checkpoint.inspect import inspect
from shardrun.errors import CheckpointError

_SECTIONS = ("run", "attempt", "parent", "counters", "topology", "schedule", "data", "numerics", "param_sha256")


def run(path: Path, verify: bool, json: bool) -> int:
    """Show `path`; 0 if all that was looked at is sound, else 3. CheckpointError if there is no checkpoint."""
    found = inspect(path, verify=verify)
    if json:
        report.json_document(found)
    elif found["kind"] == "run":
        _show_run(found)
    else:
        _show_checkpoint(found)
    if not found["good"]:
        if not json:
            report.error("\n".join(["damaged:", *(f"  {line}" for line in _problems(found))]))
        return CheckpointError.exit_code
    return 0


def _problems(found: Mapping[str, Any]) -> list[str]:
    if found["kind"] == "checkpoint":
        return list(found["problems"])
    return [line for one in found["checkpoints"] for line in one["problems"]]


def _show_run(found: Mapping[str, Any]) -> None:
    sound = "good" if found["verified"] else "complete"
    rows = [
        [one["name"], one["step"], _age(one["age_s"]), _size(one["bytes"]), sound if one["good"] else "damaged"]
        for one in found["checkpoints"]
    ]
    report.table(f"run folder {found['path']}", ["checkpoint", "step", "age", "size", "state"], rows)
    if found["leftovers"]:
        report.line(f"left-overs of an interrupted save, removed by the next one: {len(found['leftovers'])}")
    if not found["verified"]:
        report.line("sizes are checked; --verify reads every byte and checks the hashes")


def _show_checkpoint(found: Mapping[str, Any]) -> None:
    age = f", {_age(found['age_s'])} old" if "age_s" in found else ""
    report.line(f"checkpoint {found['path']}: step {found['step']}{age}, {_size(found['bytes'])}")
    for key in _SECTIONS:
        if found.get(key) is not None:
            report.line(f"  {key:<13} {_flat(found[key])}")
    if found["model"]:
        report.line()
        rows = [
            [row["name"], row["dtype"], _shape(row["shape"]), _held(row), row.get("sha256", "")[:16]]
            for row in found["model"]
        ]
        report.table("model", ["name", "dtype", "shape", "bytes", "sha256"], rows)
    for name, group in found["groups"].items():
        _show_group(name, group)
    report.line()
    rows = [[one["path"], f"{one['bytes']:,}", one["status"], one.get("sha256", "")[:16]] for one in found["files"]]
    report.table("files", ["path", "bytes", "state", "sha256"], rows)
    if not found["verified"]:
        report.line("sizes are checked; --verify reads every byte and checks the hashes")


def _show_group(name: str, group: Mapping[str, Any]) -> None:
    report.line()
    optimizer = group.get("optimizer", {})
    if isinstance(optimizer, Mapping):
        optimizer = {key: value for key, value in optimizer.items() if key != "owners"}  # told beside each tensor
    report.line(f"group {name}: {_flat(optimizer)}")
    rows = [
        [
            one["path"],
            one["dtype"],
            _shape(one["shape"]),
            f"alias of {one['alias_of']}" if one["alias_of"] else "trainable" if one["trainable"] else "frozen",
        ]
        for one in group["parameters"]
    ]
    report.table("contract", ["path", "dtype", "shape", ""], rows)
    report.line()
    rows = [
        [
            one["name"],
            one["dtype"],
            _shape(one["shape"]),
            f"{one['bytes']:,}",
            "  ".join(f"rank {held['rank']} [{held['start']}, {held['stop']})" for held in one["held_by"]),
            one.get("sha256", "")[:16],
        ]
        for one in group["state"]
    ]
    report.table("state", ["name", "dtype", "shape", "bytes", "held by", "sha256"], rows)


def _held(row: Mapping[str, Any]) -> str:
    return f"alias of {row['alias_of']}" if row["alias_of"] else f"{row['bytes']:,}"


def _shape(shape: list[int]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


def _flat(value: Any) -> str:
    """A section on one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_flat(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return "[" + ", ".join(f"({_flat(one)})" if isinstance(one, Mapping) else _flat(one) for one in value) + "]"
    return str(value)


def _size(count: int) -> str:
    """A number of bytes for people."""
    amount = float(count)
    for unit in ("bytes", "KB", "MB", "GB"):
        if amount < 1000:
            return f"{count} bytes" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def _age(seconds: int | None) -> str:
    if seconds is None:
        return "?"
    for count, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= count:
            return f"{seconds // count} {unit}"
    return f"{seconds} s"
