"""manifest.json: canonical JSON that says what a checkpoint holds and what every file of it must hash to."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from shardrun.checkpoint.safe_files import open_inside
from shardrun.errors import CheckpointError, ShardrunError
from shardrun.records.hashes import hash_problem

FORMAT = "shardrun-checkpoint"
VERSION = 2
"""What is written. Of version 1, whose files have sha256 hashes, all is read as if it were of version 2."""
_READ = (1, VERSION)
MANIFEST = "manifest.json"
ROLES = ("model", "record", "state")

MAX_BYTES = 128 << 20
"""Longest manifest that is read, and so that is written."""
_DEEPEST = 40
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}\Z")


def canonical_json(value: Any) -> bytes:
    """The one way in which a value is written: sorted keys, no spaces, ASCII, one line. NaN or infinity: ValueError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def joined_digest(digests: Sequence[str]) -> str:
    """One digest (hex) of a model that several ranks wrote, from those of its parts; of a single part its own."""
    return digests[0] if len(digests) == 1 else sha256("\n".join(digests).encode())


def sha256(data: bytes) -> str:
    """sha256 as hex."""
    return hashlib.sha256(data).hexdigest()


def seal(sections: Mapping[str, Any]) -> bytes:
    """The bytes of manifest.json: format, version and `sections`, and a digest over all of these."""
    body = {**sections, "format": FORMAT, "version": VERSION}
    return canonical_json({**body, "digest": sha256(canonical_json(body))}) + b"\n"


def is_plain_name(name: str) -> bool:
    """Whether `name` can be a file or folder name in a checkpoint: letters, digits, and . _ + - but not first."""
    return _NAME.match(name) is not None


def is_safe_path(path: Any) -> bool:
    """Whether `path` is relative, has plain names only, and is written in one way only."""
    return isinstance(path, str) and str(PurePosixPath(path)) == path and all(map(is_plain_name, path.split("/")))


def read_manifest(checkpoint: Path) -> tuple[dict[str, Any], str]:
    """The manifest of a checkpoint folder and the sha256 of its file. CheckpointError names what is wrong with it."""
    raw = _read_raw(checkpoint)
    try:
        return parse_manifest(raw), sha256(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint / MANIFEST}: {error}") from None


def _read_raw(checkpoint: Path) -> bytes:
    raw = bytearray()
    try:
        with open_inside(checkpoint, MANIFEST) as file:
            while len(raw) <= MAX_BYTES and (chunk := file.read(1 << 20)):
                raw += chunk
    except OSError as error:
        raise CheckpointError(f"{checkpoint / MANIFEST}: cannot be read: {error.strerror}") from error
    return bytes(raw)


@contextmanager
def understood(checkpoint: Path) -> Iterator[None]:
    """A manifest that is sealed, but not by a save of ours, may lack anything that is not looked at here: what
    stumbles over that in the block becomes a CheckpointError."""
    try:
        yield
    except ShardrunError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as broken:
        told = f"checkpoint {checkpoint}: malformed manifest ({type(broken).__name__}: {broken})"
        raise CheckpointError(told) from broken


def parse_manifest(raw: bytes) -> dict[str, Any]:
    """A manifest from its bytes, every field that this room relies on checked. CheckpointError otherwise.

    Each of its files has a `hash`, whatever the version.
    """
    if len(raw) > MAX_BYTES:
        raise CheckpointError(f"it has more than {MAX_BYTES:,} bytes")
    try:
        found = _DECODER.decode(raw.decode("ascii"))
    except RecursionError:
        raise CheckpointError("nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"not JSON as shardrun writes it: {error}") from None
    _require_shallow(found, _DEEPEST)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CheckpointError(f"not a manifest of format {FORMAT}")
    if type(found.get("version")) is not int or found["version"] not in _READ:
        told = " and ".join(map(str, _READ))
        raise CheckpointError(f"format version {found.get('version')!r}; this shardrun reads versions {told}")
    claimed = found.get("digest")
    if claimed != sha256(canonical_json({k: v for k, v in found.items() if k != "digest"})):
        raise CheckpointError(f"its content does not match its own digest {claimed!r}")
    if canonical_json(found) + b"\n" != raw:
        raise CheckpointError("not in canonical form: it was changed after it was written")
    if found["version"] == 1:
        _translate_hashes(found.get("files"))
    _check_fields(found)
    return found


def _translate_hashes(files: Any) -> None:
    """Where version 1 has "sha256": "<hex>", version 2 has "hash": "sha256:<hex>"; in place, before it is checked."""
    for entry in files if isinstance(files, list) else ():
        if isinstance(entry, dict):
            entry["hash"] = f"sha256:{entry.pop('sha256', None)}"


def _require_shallow(value: Any, levels: int) -> None:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if levels == 0 and inner:
        raise CheckpointError(f"nested more than {_DEEPEST} levels deep")
    for one in inner:
        _require_shallow(one, levels - 1)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _no_constants(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is too large")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constants, parse_float=_finite)


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 1 << 63


def _are_ranks(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _check_fields(found: dict[str, Any]) -> None:
    for key in ("step", "sequence", "saved_at"):
        if not _is_count(found.get(key)):
            raise CheckpointError(f"{key} is {found.get(key)!r}, not a whole number")
    topology = found.get("topology")
    if not isinstance(topology, dict) or not _is_count(topology.get("world_size"), 1):
        raise CheckpointError("topology.world_size is missing or not a whole number")
    members = topology.get("members", {})
    if not isinstance(members, dict) or not all(map(_are_ranks, members.values())):
        raise CheckpointError(f"topology.members are {members!r}, not ranks of groups")
    for key in ("groups", "model", "aliases"):
        if not isinstance(found.get(key), dict):
            raise CheckpointError(f"{key} is missing or not a mapping")
    if not isinstance(found.get("files"), list):
        raise CheckpointError("files is missing or not a list")
    _check_names(found)
    for entry in found["files"]:
        _check_entry(entry, topology["world_size"], found["groups"])


def _check_names(found: dict[str, Any]) -> None:
    for name, spec in found["model"].items():
        if not _is_spec(spec):
            raise CheckpointError(f"model: {name} is {spec!r}, not [dtype, shape]")
    for alias, name in found["aliases"].items():
        if not isinstance(name, str) or name not in found["model"] or alias in found["model"]:
            raise CheckpointError(f"aliases: {alias} -> {name!r}, which is no tensor of the model")
    for name, group in found["groups"].items():
        if not is_plain_name(name) or not isinstance(group, dict) or not _is_contract(group.get("contract")):
            raise CheckpointError(f"groups: {name!r} is not a group with a contract")
        if not _are_ranks(members := group.get("members", [])):
            raise CheckpointError(f"groups: {name}: members are {members!r}, not ranks")
    paths = [
        str(entry["path"]) if isinstance(entry, dict) and "path" in entry else str(entry) for entry in found["files"]
    ]
    if len(set(paths)) != len(paths):
        raise CheckpointError("files: a path stands twice")


def _is_spec(spec: Any) -> bool:
    return (
        isinstance(spec, list)
        and len(spec) == 2
        and isinstance(spec[0], str)
        and isinstance(spec[1], list)
        and all(map(_is_count, spec[1]))
    )


def _is_contract(contract: Any) -> bool:
    """A list of specs, sorted by path, in which an alias points to an earlier spec or to itself."""
    if not isinstance(contract, list):
        return False
    before = ""
    for index, spec in enumerate(contract):
        sound = (
            isinstance(spec, dict)
            and spec.keys() == {"path", "shape", "dtype", "trainable", "alias"}
            and isinstance(spec["path"], str)
            and (spec["path"] > before or index == 0)
            and _is_spec([spec["dtype"], spec["shape"]])
            and isinstance(spec["trainable"], bool)
            and _is_count(spec["alias"])
            and spec["alias"] <= index
        )
        if not sound:
            return False
        before = spec["path"]
    return True


def _check_entry(entry: Any, world_size: int, groups: dict[str, Any]) -> None:
    if not isinstance(entry, dict) or not is_safe_path(entry.get("path")) or entry["path"] == MANIFEST:
        path = entry.get("path") if isinstance(entry, dict) else entry
        raise CheckpointError(f"files: {path!r} is not a path inside a checkpoint")
    where = f"files: {entry['path']}"
    if not _is_count(entry.get("bytes")):
        raise CheckpointError(f"{where}: bytes is missing or malformed")
    if problem := hash_problem(entry.get("hash")):
        raise CheckpointError(f"{where}: {problem}")
    if entry.get("role") not in ROLES or not _is_count(entry.get("rank")) or entry["rank"] >= world_size:
        raise CheckpointError(f"{where}: role {entry.get('role')!r}, rank {entry.get('rank')!r} cannot be")
    if entry["role"] != "record":
        return
    fragments = entry.get("fragments")
    group = entry.get("group")
    if not isinstance(group, str) or group not in groups:
        raise CheckpointError(f"{where}: group {group!r} is not in the manifest")
    if not isinstance(fragments, dict) or not isinstance(entry.get("meta"), dict):
        raise CheckpointError(f"{where}: meta or fragments is missing or malformed")
    for path, held in fragments.items():
        if not isinstance(held, list) or len(held) != 2 or not all(map(_is_count, held)) or held[0] >= held[1]:
            raise CheckpointError(f"{where}: fragment {path} is {held!r}, not [start, stop]")
