"""What is in a checkpoint or a run folder, as plain data, without torch and without loading a tensor.

A damaged checkpoint is explained as far as it goes: a file that cannot be read is named, the others are shown.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardrun.checkpoint.assemble import Piece, Whole, assemble, hash_file, hash_pieces, open_header
from shardrun.checkpoint.manifest import MANIFEST, read_manifest
from shardrun.checkpoint.safe_files import list_tree
from shardrun.checkpoint.store import (
    STAGING,
    TRASH,
    candidates,
    checkpoints_folder,
    examine,
    is_checkpoint,
    tree_problems,
)
from shardrun.errors import CheckpointError
from shardrun.records.header import Header
from shardrun.records.header_parser import DTYPE_NAMES

HASHED_UNASKED = 1 << 30
"""Tensors are hashed without being asked for up to this many bytes in all: about a second."""

_SECTIONS = ("run", "attempt", "parent", "counters", "topology", "schedule", "data", "numerics", "param_sha256")


def inspect(path: Path, *, verify: bool = False) -> dict[str, Any]:
    """The content of `path` as plain JSON; `good` tells whether all of it is sound.

    `kind` is "run" (checkpoints, newest first) or "checkpoint" (step, counters, topology, files, model, groups with
    contract, slices and state). `verify` reads every byte and compares every hash. CheckpointError if there is no
    checkpoint at all.
    """
    if is_checkpoint(path):
        return _checkpoint(path, verify)
    if path.is_file():
        raise CheckpointError(f"{path}: is a file; name a run folder, or a checkpoint in it")
    return _run(path, verify)


# ---- a run folder ----------------------------------------------------------------------------------------------------


def _run(path: Path, verify: bool) -> dict[str, Any]:
    found = candidates(path, required=True)
    rows = []
    for one in found:
        problems = [one.why] if one.why else []
        if verify and one.complete:
            problems = _verify_files(one.path, read_manifest(one.path)[0])
        age = None if one.saved_at is None else max(0, int(time.time()) - one.saved_at)
        rows.append(
            {
                "name": one.path.name,
                "step": one.step,
                "sequence": one.sequence,
                "saved_at": one.saved_at,
                "age_s": age,
                "bytes": one.bytes,
                "complete": one.complete,
                "good": not problems,
                "problems": problems,
            }
        )
    folder = checkpoints_folder(path)
    leftovers = [str(left) for name in (STAGING, TRASH) for left in sorted((folder / name).glob("*"))]
    return {
        "kind": "run",
        "path": str(path),
        "verified": verify,
        "good": all(row["good"] for row in rows),
        "newest": found[0].path.name,
        "checkpoints": rows,
        "leftovers": leftovers,
    }


def _verify_files(path: Path, manifest: Mapping[str, Any]) -> list[str]:
    return [entry["why"] for entry in _files(path, manifest, verify=True) if entry["status"] != "good"]


# ---- one checkpoint --------------------------------------------------------------------------------------------------


def _checkpoint(path: Path, verify: bool) -> dict[str, Any]:
    found = examine(path)
    try:
        manifest = read_manifest(path)[0]
    except CheckpointError as error:
        return _without_manifest(path, str(error), found.step, verify)
    files = _files(path, manifest, verify)
    problems = [file["why"] for file in files if file["why"]]
    problems += [line for line in tree_problems(path, manifest) if line not in problems]
    headers = {file["path"]: _header(path, file, problems) for file in files if file["status"] in ("present", "good")}
    sound = {name: header for name, header in headers.items() if header is not None}
    hashes = verify or sum(entry["bytes"] for entry in manifest["files"]) <= HASHED_UNASKED
    groups = {name: _group(path, manifest, name, sound, hashes, problems) for name in manifest["groups"]}
    if not found.complete and found.why not in problems and not problems:
        problems.append(found.why)
    return {
        "kind": "checkpoint",
        "path": str(path),
        "step": manifest["step"],
        "sequence": manifest["sequence"],
        "saved_at": manifest["saved_at"],
        "age_s": max(0, int(time.time()) - manifest["saved_at"]),
        "verified": verify,
        "good": not problems,
        "problems": problems,
        **{key: manifest[key] for key in _SECTIONS if key in manifest},
        "bytes": sum(entry["bytes"] for entry in manifest["files"]),
        "files": files,
        "model": _model(path, manifest, sound, hashes),
        "groups": groups,
    }


def _files(path: Path, manifest: Mapping[str, Any], verify: bool) -> list[dict[str, Any]]:
    """Every registered file with its status: present (right size, hash not read), good, bad or missing."""
    sizes = {relative: status.st_size for relative, status in list_tree(path)}
    rows = []
    for entry in manifest["files"]:
        row = {key: entry[key] for key in ("path", "role", "rank", "group", "bytes", "sha256") if key in entry}
        where = path / entry["path"]
        size = sizes.get(entry["path"])
        status, why = "present", ""
        if size is None:
            status, why = "missing", f"{where}: is missing"
        elif size != entry["bytes"]:
            status, why = "bad", f"{where}: {entry['bytes']:,} bytes expected, {size:,} found"
        elif verify:
            status, why = _verified(path, entry)
        rows.append({**row, "status": status, "why": why})
    return rows


def _verified(path: Path, entry: Mapping[str, Any]) -> tuple[str, str]:
    try:
        found = hash_file(path, entry["path"])[1]
    except CheckpointError as error:
        return "bad", str(error)
    if found != entry["sha256"]:
        return (
            "bad",
            f"{path / entry['path']}: sha256 {entry['sha256']} expected, {found} found: its content was changed",
        )
    return "good", ""


def _header(path: Path, file: dict[str, Any], problems: list[str]) -> Header | None:
    """The header of a file whose size is right; what is wrong with it goes to the file's row and to `problems`."""
    try:
        return open_header(path, file["path"])
    except CheckpointError as error:
        file["status"], file["why"] = "bad", str(error)
        problems.append(str(error))
        return None


def _model(
    path: Path, manifest: Mapping[str, Any], headers: Mapping[str, Header], hashes: bool
) -> list[dict[str, Any]]:
    """Every tensor of the model by name; an alias names what it is tied to, and has no bytes of its own."""
    stored = {
        name: (file["path"], entry)
        for file in manifest["files"]
        if file["role"] == "model" and file["path"] in headers
        for name, entry in headers[file["path"]].tensors.items()
    }
    rows = []
    for name in sorted([*manifest["model"], *manifest["aliases"]]):
        first = manifest["aliases"].get(name)
        dtype, shape = manifest["model"][first or name]
        row = {"name": name, "dtype": dtype, "shape": shape, "alias_of": first, "bytes": 0}
        if first is None and name in stored:
            relative, entry = stored[name]
            row["bytes"] = entry.nbytes
            if hashes:
                row["sha256"] = hash_pieces(path, [Piece(0, 0, 0, relative, entry)])
        rows.append(row)
    return rows


def _group(
    path: Path, manifest: Mapping[str, Any], name: str, headers: Mapping[str, Header], hashes: bool, problems: list[str]
) -> dict[str, Any]:
    group = manifest["groups"][name]
    records = [entry for entry in manifest["files"] if entry["role"] == "record" and entry["group"] == name]
    state = assemble(manifest, name, headers)
    for whole in state:
        problems += whole.gaps()
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
            for entry in records
        ],
        "state": [_state_row(path, whole, hashes) for whole in state],
    }


def _state_row(path: Path, whole: Whole, hashes: bool) -> dict[str, Any]:
    return {
        "name": whole.name,
        "dtype": DTYPE_NAMES[whole.dtype],
        "shape": list(whole.shape),
        "bytes": whole.nbytes,
        "held_by": [{"rank": piece.rank, "start": piece.start, "stop": piece.stop} for piece in whole.pieces],
        **({"sha256": hash_pieces(path, whole.pieces)} if hashes and not whole.gaps() else {}),
    }


# ---- what is left without a manifest ---------------------------------------------------------------------------------


def _without_manifest(path: Path, why: str, step: int, verify: bool) -> dict[str, Any]:
    problems, files = [why], []
    for relative, status in list_tree(path):
        if relative == MANIFEST:
            continue
        row: dict[str, Any] = {"path": relative, "bytes": status.st_size, "status": "not verifiable", "why": ""}
        try:
            row["tensors"] = len(open_header(path, relative).tensors)
        except CheckpointError as error:
            row["status"], row["why"] = "bad", str(error)
            problems.append(str(error))
        files.append(row)
    return {
        "kind": "checkpoint",
        "path": str(path),
        "step": step,
        "verified": verify,
        "good": False,
        "problems": problems,
        "bytes": sum(file["bytes"] for file in files),
        "files": files,
        "model": [],
        "groups": {},
    }
