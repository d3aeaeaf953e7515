"""Which tensors a checkpoint holds and where their bytes are, from its manifest and headers; no tensor is read.

Of a damaged checkpoint it tells what is left: each file with its status, each tensor with how much of it is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import Any

from shardrun.checkpoint.assemble import Piece, Whole, assemble, hash_file, open_header
from shardrun.checkpoint.manifest import MANIFEST
from shardrun.checkpoint.safe_files import list_tree, open_inside
from shardrun.checkpoint.store import tree_problems
from shardrun.errors import CheckpointError
from shardrun.records.hashes import changed
from shardrun.records.header import MAX_HEADER, Entry, Header, read_exactly
from shardrun.records.header_parser import DTYPE_NAMES, parse_table

_CODES = {name: code for code, name in DTYPE_NAMES.items()}
_PREFIX = 8


class Meter:
    """Hears how many bytes are going to be read, and of those that were; this one keeps it to itself."""

    def expect(self, nbytes: int) -> None:
        """So many more are to come."""

    def read(self, nbytes: int) -> None:
        """So many have come."""


class Left(StrEnum):
    """How much of a tensor is there."""

    WHOLE = "whole"
    """All of it, in files that are as they should be (their hashes read or not)."""
    UNVERIFIED = "unverified"
    """All of it, but a file that holds it is damaged somewhere."""
    PARTLY = "partly"
    LOST = "lost"


@dataclass
class File:
    """A file. `status`: present (right size, hash not read), good (hash read), bad, missing, or not verifiable.

    `tensors` are those whose bytes are all there, also where the file is bad.
    """

    path: str
    bytes: int
    status: str
    why: str = ""
    entry: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Entry] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        """Whether nothing is known against it."""
        return self.status not in ("bad", "missing")


@dataclass
class Held:
    """A tensor, how much of it is left, and the name of the one that it is tied to."""

    whole: Whole
    left: Left
    alias_of: str | None = None

    @property
    def is_readable(self) -> bool:
        """Whether it has bytes of its own, and all of them are there."""
        return self.alias_of is None and self.left in (Left.WHOLE, Left.UNVERIFIED)


@dataclass
class Contents:
    """What `root` holds. `sections`: (kind, name) -> tensors; kind "model", "group", "rank", or "file" without a
    manifest. `lost`: group -> parameters of whose state nothing is left."""

    root: Path
    manifest: Mapping[str, Any] | None
    files: list[File]
    sections: dict[tuple[str, str], list[Held]] = field(default_factory=dict)
    lost: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def all(self) -> Iterator[tuple[tuple[str, str], Held]]:
        """Every tensor with its section."""
        for section, held in self.sections.items():
            for one in held:
                yield section, one


# ---- with a manifest -------------------------------------------------------------------------------------------------


def checkpoint_contents(path: Path, manifest: Mapping[str, Any], *, verify: bool, meter: Meter) -> Contents:
    """The contents of a checkpoint by its manifest. With `verify` every byte is read and hashed."""
    files = checked_files(path, manifest, verify=verify, meter=meter)
    for file in files:
        _look_into(path, file)
    found = Contents(path, manifest, files, problems=[file.why for file in files if file.why])
    found.problems += [line for line in tree_problems(path, manifest) if line not in found.problems]
    found.sections["model", ""] = _model(manifest, files)
    for group in manifest["groups"]:
        found.sections["group", group] = _state(manifest, group, files, found)
    for file in files:
        if file.entry["role"] == "state":
            found.sections["rank", str(file.entry["rank"])] = list(_as_they_stand(file, file.entry["rank"]))
    return found


def checked_files(path: Path, manifest: Mapping[str, Any], *, verify: bool, meter: Meter) -> list[File]:
    """Every registered file with its status."""
    sizes = {relative: status.st_size for relative, status in list_tree(path)}
    meter.expect(sum(entry["bytes"] for entry in manifest["files"]) if verify else 0)
    files = []
    for entry in manifest["files"]:
        where = path / entry["path"]
        size = sizes.get(entry["path"])
        file = File(entry["path"], entry["bytes"], "present", entry=entry)
        if size is None:
            file.status, file.why = "missing", f"{where}: is missing"
        elif size != entry["bytes"]:
            file.status, file.why = "bad", f"{where}: {entry['bytes']:,} bytes expected, {size:,} found"
        elif verify:
            file.status, file.why = _verified(path, entry, meter)
        files.append(file)
    return files


def _verified(path: Path, entry: Mapping[str, Any], meter: Meter) -> tuple[str, str]:
    try:
        found = hash_file(path, entry["path"], like=entry["hash"], read=meter.read)
    except CheckpointError as error:
        return "bad", str(error)
    if found != entry["hash"]:
        return "bad", f"{path / entry['path']}: {changed(entry['hash'], found)}"
    return "good", ""


def _look_into(path: Path, file: File) -> None:
    """Find the tensors of a file; what is wrong with its header goes to its status."""
    if file.status == "missing":
        return
    if file.is_sound:
        try:
            header = open_header(path, file.path)
        except CheckpointError as error:
            file.status, file.why = "bad", str(error)
        else:
            file.tensors, file.metadata = header.tensors, header.metadata
            return
    file.tensors = _salvaged(path, file.path)


def _salvaged(path: Path, relative: str) -> dict[str, Entry]:
    """The tensors of a damaged file whose bytes are all there; none if its header cannot be read."""
    try:
        with open_inside(path, relative) as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(read_exactly(file, min(_PREFIX, size), relative), "little")
            if size < _PREFIX or length > min(MAX_HEADER, size - _PREFIX):
                return {}
            entries, _ = parse_table(read_exactly(file, length, relative))
    except (CheckpointError, OSError, ValueError):
        return {}
    begin = _PREFIX + length
    return {
        one.name: Entry(one.dtype, one.shape, begin + one.start, begin + one.stop)
        for one in entries
        if begin + one.stop <= size
    }


def _model(manifest: Mapping[str, Any], files: Iterable[File]) -> list[Held]:
    """Every tensor of the model by name, aliases among them."""
    stored = {
        name: (file, entry) for file in files if file.entry["role"] == "model" for name, entry in file.tensors.items()
    }
    found = []
    for name in sorted([*manifest["model"], *manifest["aliases"]]):
        first = manifest["aliases"].get(name)
        dtype, shape = manifest["model"][first or name]
        whole, left = Whole(name, _CODES.get(dtype, dtype), tuple(shape)), Left.LOST
        if (first or name) in stored:
            file, entry = stored[first or name]
            if (DTYPE_NAMES[entry.dtype], list(entry.shape)) == (dtype, shape):
                left = Left.WHOLE if file.is_sound else Left.UNVERIFIED
                if first is None:
                    whole.pieces.append(Piece(0, prod(shape), file.entry["rank"], file.path, entry))
        found.append(Held(whole, left, first))
    return found


def _state(manifest: Mapping[str, Any], group: str, files: Iterable[File], found: Contents) -> list[Held]:
    """The state tensors of a group, put together from all ranks' pieces."""
    records = {file.path: file for file in files if file.entry["role"] == "record" and file.entry["group"] == group}
    headers = {path: Header(dict(file.tensors), {}, 0, file.bytes) for path, file in records.items()}
    all_sound = all(file.is_sound for file in records.values())
    held = []
    for whole in assemble(manifest, group, headers):
        gaps = whole.gaps()
        if gaps and all_sound:
            found.problems += gaps
        sound = all(records[piece.path].is_sound for piece in whole.pieces)
        held.append(Held(whole, Left.PARTLY if gaps else Left.WHOLE if sound else Left.UNVERIFIED))
    there = {one.whole.name.rpartition("/")[0] for one in held}
    expected = {path for file in records.values() if not file.is_sound for path in file.entry["fragments"]}
    found.lost[group] = sorted(expected - there)
    return held


def _as_they_stand(file: File, rank: int) -> Iterator[Held]:
    left = Left.WHOLE if file.is_sound else Left.UNVERIFIED
    for name, entry in sorted(file.tensors.items()):
        numel = prod(entry.shape)
        yield Held(Whole(name, entry.dtype, entry.shape, [Piece(0, numel, rank, file.path, entry)]), left)


# ---- without one -----------------------------------------------------------------------------------------------------


def loose_contents(root: Path, names: Iterable[str] | None = None) -> Contents:
    """The tensors of safetensors files that no manifest explains: `names` below `root`, or all that are there."""
    found = Contents(root, None, [])
    for relative in [one for one, _ in list_tree(root) if one != MANIFEST] if names is None else names:
        file = File(relative, (root / relative).lstat().st_size, "not verifiable")
        _look_into(root, file)
        if file.why:
            found.problems.append(file.why)
        found.files.append(file)
        found.sections["file", relative] = list(_as_they_stand(file, 0))
    return found
