"""What is in a checkpoint, a run folder or a safetensors file, as plain data, without torch.

A damaged checkpoint is explained as far as it goes: what is wrong is named, and what is left is shown.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrun.checkpoint.contents import (
    Contents,
    Held,
    Left,
    Meter,
    checked_files,
    checkpoint_contents,
    loose_contents,
)
from shardrun.checkpoint.manifest import read_manifest
from shardrun.checkpoint.statistics import read_whole
from shardrun.checkpoint.store import STAGING, TRASH, Found, candidates, checkpoints_folder, examine, is_checkpoint
from shardrun.errors import CheckpointError
from shardrun.records.header_parser import DTYPE_NAMES

HASHED_UNASKED = 1 << 30
"""Tensors are hashed without being asked for up to this many bytes in all: about a second."""

SECTIONS = (
    "run",
    "attempt",
    "parent",
    "resharded",
    "counters",
    "topology",
    "schedule",
    "data",
    "numerics",
    "param_sha256",
)
"""What is shown of a manifest as it stands."""


@dataclass(frozen=True)
class Ask:
    """What is wanted besides names and sizes, and who hears how far it is."""

    verify: bool
    """Read every file and compare its hash."""
    stats: bool
    """Read every tensor and take its statistics."""
    meter: Meter


def inspect(path: Path, *, verify: bool = False, stats: bool = False, meter: Meter | None = None) -> dict[str, Any]:
    """The content of `path` as plain JSON; `good` tells whether all of it is sound.

    `kind` is "run" (checkpoints, newest first), "checkpoint" (step, counters, topology, files, model, groups with
    contract, slices and state, state of the ranks) or "files" (tensors of safetensors files). `verify` reads every byte
    and compares every hash; `stats` takes the statistics of every tensor. CheckpointError if there is nothing to see.
    """
    ask = Ask(verify, stats, meter or Meter())
    try:
        if is_checkpoint(path):
            return _checkpoint(path, ask)
        contents = plain_files(path)
        if contents is not None:
            return _loose(path, contents, ask)
        return _run(path, ask)
    except (FileNotFoundError, NotADirectoryError) as error:  # of a run that goes on: retention took it
        raise CheckpointError(f"{error.filename}: was removed while it was looked at; look again") from error


def plain_files(path: Path) -> Contents | None:
    """The tensors of a single safetensors file, or of those in a folder that is no run's; None for anything else."""
    if path.is_file():
        whole = path.resolve()  # it may be a link, as in the caches of others: this file is the user's own choice
        return loose_contents(whole.parent, [whole.name])
    if path.is_dir() and not checkpoints_folder(path).is_dir():
        names = sorted(one.name for one in path.glob("*.safetensors"))
        return loose_contents(path, names) if names else None
    return None


# ---- a run folder ----------------------------------------------------------------------------------------------------


def _run(path: Path, ask: Ask) -> dict[str, Any]:
    rows = [row for one in candidates(path, wanted="look at") if (row := _run_row(one, ask)) is not None]
    folder = checkpoints_folder(path)
    leftovers = [str(left) for name in (STAGING, TRASH) for left in sorted((folder / name).glob("*"))]
    return {
        "kind": "run",
        "path": str(path),
        "verified": ask.verify,
        "good": all(row["good"] for row in rows),
        "newest": rows[0]["name"] if rows else None,
        "bytes": sum(row["bytes"] for row in rows),
        "checkpoints": rows,
        "leftovers": leftovers,
    }


def _run_row(one: Found, ask: Ask) -> dict[str, Any] | None:
    """A checkpoint of a run; None if retention, of a run that goes on, has taken it meanwhile."""
    problems = [one.why] if one.why else []
    manifest: Mapping[str, Any] = {}
    try:
        if one.sequence is not None:
            manifest = read_manifest(one.path)[0]
        if one.complete and ask.verify:
            files = checked_files(one.path, manifest, verify=True, meter=ask.meter)
            problems = [file.why for file in files if file.why]
    except (CheckpointError, FileNotFoundError) as error:
        problems = [str(error)]
    if problems and not one.path.is_dir():
        return None
    return {
        "name": one.path.name,
        "step": one.step,
        "sequence": one.sequence,
        "saved_at": one.saved_at,
        "age_s": None if one.saved_at is None else _age_s(one.saved_at),
        "bytes": one.bytes,
        **{key: manifest.get(key) for key in ("run", "attempt", "parent")},
        "world_size": manifest["topology"]["world_size"] if manifest else None,
        "complete": one.complete,
        "good": not problems,
        "problems": problems,
    }


def _age_s(saved_at: int) -> int:
    return max(0, int(time.time()) - saved_at)


# ---- one checkpoint --------------------------------------------------------------------------------------------------


def _checkpoint(path: Path, ask: Ask) -> dict[str, Any]:
    found = examine(path)
    try:
        manifest = read_manifest(path)[0]
    except CheckpointError as error:
        document = _loose(path, loose_contents(path), ask)
        problems = [str(error), *document["problems"]]
        return {**document, "kind": "checkpoint", "step": found.step, "good": False, "problems": problems}
    contents = checkpoint_contents(path, manifest, verify=ask.verify, meter=ask.meter)
    ask.meter.expect(_to_read(contents, ask))
    problems = contents.problems
    rows = {section: _rows(contents, held, ask) for section, held in contents.sections.items()}
    if not found.complete and found.why not in problems and not problems:
        problems.append(found.why)
    return {
        "kind": "checkpoint",
        "path": str(path),
        "step": manifest["step"],
        "sequence": manifest["sequence"],
        "saved_at": manifest["saved_at"],
        "age_s": _age_s(manifest["saved_at"]),
        "verified": ask.verify,
        "good": not problems,
        "problems": problems,
        **{key: manifest[key] for key in SECTIONS if key in manifest},
        "bytes": sum(entry["bytes"] for entry in manifest["files"]),
        "files": _file_rows(contents),
        "model": rows["model", ""],
        "groups": {name: _group(contents, name, rows["group", name]) for name in manifest["groups"]},
        "ranks": [{"rank": int(name), "tensors": rows[kind, name]} for kind, name in rows if kind == "rank"],
        "left": _left(contents),
    }


def _group(contents: Contents, name: str, state: list[dict[str, Any]]) -> dict[str, Any]:
    assert contents.manifest is not None
    group = contents.manifest["groups"][name]
    contract = group["contract"]
    return {
        **{key: value for key, value in group.items() if key not in ("contract", "layout")},
        "parameters": [
            {
                **{key: spec[key] for key in ("path", "shape", "dtype", "trainable")},
                "alias_of": None if spec["alias"] == index else contract[spec["alias"]]["path"],
            }
            for index, spec in enumerate(contract)
        ],
        "slices": [
            {"rank": entry["rank"], "file": entry["path"], "bytes": entry["bytes"], "fragments": entry["fragments"]}
            for entry in contents.manifest["files"]
            if entry["role"] == "record" and entry["group"] == name
        ],
        "state": state,
        "lost": contents.lost[name],
    }


def _loose(path: Path, contents: Contents, ask: Ask) -> dict[str, Any]:
    """Files without a manifest: nothing says what should be there, so nothing can be verified."""
    ask.meter.expect(_to_read(contents, ask))
    tensors = [
        {**row, "file": name} for (_, name), held in contents.sections.items() for row in _rows(contents, held, ask)
    ]
    return {
        "kind": "files",
        "path": str(path),
        "verified": False,
        "good": not contents.problems,
        "problems": contents.problems,
        "bytes": sum(file.bytes for file in contents.files),
        "files": _file_rows(contents),
        "tensors": tensors,
        "left": _left(contents),
    }


# ---- rows ------------------------------------------------------------------------------------------------------------


def _file_rows(contents: Contents) -> list[dict[str, Any]]:
    rows = []
    for file in contents.files:
        registered = {key: file.entry[key] for key in ("role", "rank", "group", "hash") if key in file.entry}
        row = {"path": file.path, "bytes": file.bytes, **registered, "tensors": len(file.tensors)}
        if file.metadata and contents.manifest is None:
            row["metadata"] = dict(file.metadata)
        rows.append({**row, "status": file.status, "why": file.why})
    return rows


def _hashes(contents: Contents, ask: Ask) -> bool:
    return ask.verify or sum(file.bytes for file in contents.files) <= HASHED_UNASKED


def _to_read(contents: Contents, ask: Ask) -> int:
    if not (ask.stats or _hashes(contents, ask)):
        return 0
    return sum(held.whole.nbytes for _, held in contents.all() if held.is_readable)


def _rows(contents: Contents, held: Iterable[Held], ask: Ask) -> list[dict[str, Any]]:
    hashes = _hashes(contents, ask)
    return [_row(contents, one, ask, hashes) for one in held]


def _row(contents: Contents, held: Held, ask: Ask, hashes: bool) -> dict[str, Any]:
    whole = held.whole
    row: dict[str, Any] = {
        "name": whole.name,
        "dtype": DTYPE_NAMES.get(whole.dtype, whole.dtype),
        "shape": list(whole.shape),
        "bytes": whole.nbytes,
        "alias_of": held.alias_of,
        "held_by": [{"rank": piece.rank, "start": piece.start, "stop": piece.stop} for piece in whole.pieces],
    }
    if held.is_readable and (hashes or ask.stats):
        try:
            row |= read_whole(contents.root, whole, hashes=hashes, stats=ask.stats, meter=ask.meter)
        except (CheckpointError, OSError) as error:  # it was cut meanwhile, or the disk cannot read it
            held.left = Left.LOST
            contents.problems.append(str(error))
    return {**row, "left": held.left.value}


def _left(contents: Contents) -> dict[str, Any]:
    """What is good, and how many tensors are whole, unverified, partly there or lost."""
    count = Counter(held.left.value for _, held in contents.all() if held.alias_of is None)
    count[Left.LOST.value] += sum(map(len, contents.lost.values()))
    return {
        "good_files": [file.path for file in contents.files if file.is_sound],
        "bad_files": [file.path for file in contents.files if not file.is_sound],
        "tensors": {left.value: count[left.value] for left in Left},
    }
