"""A run's folder of checkpoints: names, what is there, and which one is the newest. Changes nothing, needs no torch."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrun.checkpoint.manifest import MANIFEST, read_manifest
from shardrun.checkpoint.safe_files import list_tree, open_inside
from shardrun.errors import CheckpointError, UsageError

CHECKPOINTS = "checkpoints"
STAGING = ".staging"
TRASH = ".trash"
LATEST = "LATEST"
MODEL_FILE = "model.safetensors"

_STEP = re.compile(r"step-(\d{10,18})\Z")
_MAX_HINT = 4096


def step_name(step: int) -> str:
    """Folder name of the checkpoint of a step: step-0000001200."""
    return f"step-{step:010d}"


def record_file(group: str, rank: int, world_size: int, strategy: str = "zero2") -> str:
    """Path, inside a checkpoint, of a rank's record of a group; `strategy` is zero2 or zero1."""
    return f"{strategy}/{group}/{_shard(rank, world_size)}"


def model_file(part: int, parts: int) -> str:
    """Path, inside a checkpoint, of the model, or of one of its `parts` where no rank has all of it."""
    return MODEL_FILE if parts == 1 else f"model-{part + 1:05d}-of-{parts:05d}.safetensors"


def state_file(rank: int, world_size: int) -> str:
    """Path, inside a checkpoint, of a rank's own state."""
    return f"state/{_shard(rank, world_size)}"


def _shard(rank: int, world_size: int) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder name, or None for any other name."""
    found = _STEP.match(name)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Found:
    """A published checkpoint. `complete`: the manifest holds and every file is there with its size (hashes not read).

    `sequence` counts the saves of a run folder, so that the newest is the one saved last: after a resume from an
    earlier step, a higher step number is the older one. None where the manifest cannot tell.
    """

    step: int
    path: Path
    complete: bool
    why: str = ""
    sequence: int | None = None
    bytes: int = 0
    saved_at: int | None = None
    manifest_sha256: str = ""


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is one checkpoint, damaged or not, rather than a run folder."""
    return path.is_dir() and ((path / MANIFEST).is_file() or step_of(path.name) is not None)


def require_outside(target: Path) -> None:
    """Refuse to write `target` into a checkpoint, which would be damaged by a file that it does not know."""
    for folder in Path(os.path.abspath(target)).parents:
        if (folder / MANIFEST).is_file():
            raise UsageError(f"{target}: lies in the checkpoint {folder}, which it would damage; give another place")


def checkpoints_folder(path: Path) -> Path:
    """The folder that holds the checkpoints of run folder `path` (or `path`, if it is that folder already)."""
    return path if path.name == CHECKPOINTS and not (path / CHECKPOINTS).is_dir() else path / CHECKPOINTS


def examine(path: Path) -> Found:
    """Look at one checkpoint folder: manifest, and names and sizes of the files. Reads no tensor."""
    named = step_of(path.name)
    size = 0
    try:
        size = sum(status.st_size for _, status in list_tree(path))
        manifest, manifest_sha256 = read_manifest(path)
        problems = tree_problems(path, manifest)
    except (CheckpointError, OSError) as error:
        return Found(named or 0, path, False, str(error), bytes=size)
    step = manifest["step"]
    if named is not None and named != step:
        problems.insert(0, f"{path / MANIFEST}: is that of step {step}")
    return Found(
        step if named is None else named,
        path,
        not problems,
        "; ".join(problems),
        manifest["sequence"],
        size,
        manifest["saved_at"],
        manifest_sha256,
    )


def tree_problems(path: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Files that are missing, of another size, not registered, or not plain files; each line names one."""
    registered = {entry["path"]: entry["bytes"] for entry in manifest["files"]}
    problems, seen = [], set()
    for relative, status in list_tree(path):
        seen.add(relative)
        if not stat.S_ISREG(status.st_mode):
            problems.append(f"{path / relative}: is not a regular file")
        elif relative in registered and status.st_size != registered[relative]:
            problems.append(f"{path / relative}: {registered[relative]:,} bytes expected, {status.st_size:,} found")
        elif relative not in registered and relative != MANIFEST:
            problems.append(f"{path / relative}: is not in the manifest; remove it if you put it there")
    problems += [f"{path / missing}: is missing" for missing in registered if missing not in seen]
    return problems


def scan(run_dir: Path) -> list[Found]:
    """All published checkpoints of a run folder, newest first; [] where there are none. Left-overs are none.

    A folder whose manifest cannot be read counts as the newest if LATEST names it, and else as newer than every
    checkpoint of a lower step, unless LATEST names a complete one and its manifest: better to stop and say so than to
    go on from an old state unasked.
    """
    folder = checkpoints_folder(run_dir)
    try:
        names = sorted(entry.name for entry in folder.iterdir() if step_of(entry.name) is not None)
    except (FileNotFoundError, NotADirectoryError):
        return []
    # One that vanishes between listing and looking was removed by retention.
    found = [one for one in (examine(folder / name) for name in names) if one.path.is_dir()]
    return _oldest_first(found, read_latest(run_dir))[::-1]


def _oldest_first(found: list[Found], hint: Mapping[str, Any]) -> list[Found]:
    ordered = sorted((one for one in found if one.sequence is not None), key=lambda one: (one.sequence, one.step))
    for unknown in (one for one in found if one.sequence is None):
        place = max((index for index, one in enumerate(ordered, 1) if one.step < unknown.step), default=0)
        if unknown.path.name == hint.get("dir"):
            place = len(ordered)
        for index, one in enumerate(ordered):
            if one.complete and (one.path.name, one.manifest_sha256) == (hint.get("dir"), hint.get("manifest_sha256")):
                place = min(place, index)
        ordered.insert(place, unknown)
    return ordered


def newest(run_dir: Path) -> Found | None:
    """The newest published checkpoint, complete or not; None where there is none."""
    found = scan(run_dir)
    return found[0] if found else None


def candidates(path: Path, *, wanted: str | None = None) -> list[Found]:
    """The checkpoints that `path` (a run folder or one checkpoint) offers, newest first.

    `wanted`: what one is needed for, such as "resume from"; CheckpointError then where there is none.
    """
    if is_checkpoint(path):
        return [examine(path)]
    found = scan(path)
    if wanted is not None and not found:
        what = "holds no checkpoint" if path.is_dir() else "does not exist" if not path.exists() else "is no folder"
        raise CheckpointError(f"{path}: {what}; nothing to {wanted}")
    return found


def complete(path: Path, wanted: str) -> Path:
    """The checkpoint `path`, or the newest of the run folder `path`; CheckpointError if damaged or not there."""
    first = candidates(path, wanted=wanted)[0]
    if not first.complete:
        raise CheckpointError(f"checkpoint {first.path} is damaged: {first.why}")
    return first.path


def read_latest(run_dir: Path) -> dict[str, Any]:
    """The hint {step, dir, manifest_sha256} that the last save left; {} if there is none that can be read."""
    try:
        with open_inside(checkpoints_folder(run_dir), LATEST) as file:
            hint = json.loads(file.read(_MAX_HINT))
    except (CheckpointError, OSError, ValueError, RecursionError):
        return {}
    return hint if isinstance(hint, dict) else {}
