"""The state of whole parameters, put together from the pieces in the ranks' files. Integers and bytes, no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from shardrun.checkpoint.safe_files import open_inside
from shardrun.errors import CheckpointError
from shardrun.records.fit import holds_whole
from shardrun.records.header import Entry, Header, read_exactly, read_header_of
from shardrun.shard.contract import Contract

_CHUNK = 4 << 20


@dataclass(frozen=True)
class Piece:
    """The elements [start, stop) of a flattened state tensor, as `entry` of file `path`, written by `rank`."""

    start: int
    stop: int
    rank: int
    path: str
    entry: Entry


@dataclass
class Whole:
    """A state tensor "<path>/<key>" of a whole parameter.

    `shape` is the parameter's, () for a scalar, or its own where a rank holds whole parameters.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.entry.nbytes for piece in self.pieces)

    def gaps(self) -> list[str]:
        """What keeps the pieces from being the whole tensor, once."""
        found, at = [], 0
        for piece in self.pieces:
            if piece.start != at:
                what = "missing" if piece.start > at else "held twice"
                low, high = sorted((at, piece.start))
                found.append(f"state {self.name}: elements [{low}, {high}) of {self.numel} are {what}")
            if piece.entry.dtype != self.dtype:
                found.append(f"state {self.name}: rank {piece.rank} has dtype {piece.entry.dtype}, not {self.dtype}")
            at = max(at, piece.stop)
        if at < self.numel:
            found.append(f"state {self.name}: elements [{at}, {self.numel}) of {self.numel} are missing")
        return found


def open_header(checkpoint: Path, relative: str) -> Header:
    """The header of a file of a checkpoint; CheckpointError if there is no sound one."""
    with open_inside(checkpoint, relative) as file:
        return read_header_of(file, str(checkpoint / relative))[0]


def assemble(manifest: Mapping[str, Any], group: str, headers: Mapping[str, Header]) -> list[Whole]:
    """All state tensors of a group, sorted by name, from the record files whose header could be read."""
    section = manifest["groups"][group]
    shapes = {spec.path: spec.shape for spec in Contract.from_json(section["contract"]).specs}
    owned = holds_whole(section)
    wholes: dict[str, Whole] = {}
    for entry in manifest["files"]:
        if entry["role"] != "record" or entry["group"] != group or entry["path"] not in headers:
            continue
        for name, tensor in headers[entry["path"]].tensors.items():
            path = name.rpartition("/")[0]
            start, stop = entry["fragments"].get(path, (0, 0))
            shape = shapes.get(path, tensor.shape)
            if not tensor.shape or (owned and tensor.shape != (stop - start,)):
                start, stop, shape = 0, prod(tensor.shape), tensor.shape
            whole = wholes.setdefault(name, Whole(name, tensor.dtype, shape))
            whole.pieces.append(Piece(start, stop, entry["rank"], entry["path"], tensor))
    for whole in wholes.values():
        whole.pieces.sort(key=lambda piece: (piece.start, piece.stop, piece.rank))
    return [wholes[name] for name in sorted(wholes)]


def hash_pieces(checkpoint: Path, pieces: list[Piece]) -> str:
    """sha256 (hex) over the bytes of the pieces, one after another."""
    digest = hashlib.sha256()
    for piece in pieces:
        for chunk in _chunks(checkpoint, piece):
            digest.update(chunk)
    return digest.hexdigest()


def _chunks(checkpoint: Path, piece: Piece) -> Iterator[bytearray]:
    with open_inside(checkpoint, piece.path) as file:
        file.seek(piece.entry.start)
        left = piece.entry.nbytes
        while left:
            count = min(left, _CHUNK)
            yield read_exactly(file, count, str(checkpoint / piece.path))
            left -= count


def hash_file(checkpoint: Path, relative: str) -> tuple[int, str]:
    """Size and sha256 (hex) of a file; CheckpointError if it cannot be opened or is no plain file."""
    digest, size = hashlib.sha256(), 0
    try:
        with open_inside(checkpoint, relative) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise CheckpointError(f"{checkpoint / relative}: cannot be read: {error.strerror}") from error
    return size, digest.hexdigest()
