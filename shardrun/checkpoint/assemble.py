"""The state of whole parameters, put together from the pieces in the ranks' files. Integers and bytes, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from shardrun.checkpoint.safe_files import open_inside
from shardrun.errors import CheckpointError
from shardrun.records.fit import holds_whole
from shardrun.records.hashes import FileHash
from shardrun.records.header import Entry, Header, read_exactly, read_header_of
from shardrun.shard.contract import Contract

_CHUNK = 1 << 20


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
            if prod(piece.entry.shape) != piece.stop - piece.start:
                held = f"{prod(piece.entry.shape)} elements for [{piece.start}, {piece.stop})"
                found.append(f"state {self.name}: rank {piece.rank} holds {held}")
            if piece.entry.dtype != self.dtype:
                found.append(f"state {self.name}: rank {piece.rank} has dtype {piece.entry.dtype}, not {self.dtype}")
            at = max(at, piece.stop)
        if at > self.numel:
            found.append(f"state {self.name}: elements [{self.numel}, {at}) are beyond its {self.numel}")
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


def chunks(root: Path, pieces: Iterable[Piece], nbytes: int) -> Iterator[bytearray]:
    """The bytes of the pieces, one after another, in runs of `nbytes` (the last one may be shorter) wherever the pieces
    begin and end; CheckpointError if a file is shorter than it was."""
    run = bytearray()
    for piece in pieces:
        with open_inside(root, piece.path) as file:
            file.seek(piece.entry.start)
            left = piece.entry.nbytes
            while left:
                count = min(left, nbytes - len(run))
                run += read_exactly(file, count, str(root / piece.path))
                left -= count
                if len(run) == nbytes:
                    yield run
                    run = bytearray()
    if run:
        yield run


def hash_file(root: Path, relative: str, *, like: str, read: Callable[[int], None] = lambda nbytes: None) -> str:
    """The hash of a file, by the algorithm of the hash `like`; `read` hears of every byte. CheckpointError if it is no
    plain file."""
    digest = FileHash.like(like)
    try:
        with open_inside(root, relative) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                read(len(chunk))
    except OSError as error:
        raise CheckpointError(f"{root / relative}: cannot be read: {error.strerror}") from error
    return digest.text
