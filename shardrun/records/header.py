"""safetensors files without torch: a writer with fixed bytes, and a reader that believes nothing.

The format: 8 bytes little-endian length of the header; the header, JSON padded with spaces to a multiple of 8; the
tensors without gaps. Tensors stand in the official library's own order (widest dtype first, then by name), which keeps
each one aligned, and the bytes equal those of the official writer; but the official one takes its metadata from a hash
map, so that its bytes change from process to process.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import BinaryIO

from shardrun.errors import CheckpointError
from shardrun.records.header_parser import DTYPE_BYTES, METADATA, RawEntry, parse_header
from shardrun.records.new_file import FileDigest, NewFile

MAX_HEADER = 64 << 20
"""Longest header that is read, in bytes: about half a million tensors."""

_ORDER = {dtype: place for place, dtype in enumerate(DTYPE_BYTES)}
_PREFIX = 8


@dataclass(frozen=True)
class TensorBytes:
    """A tensor to be written: safetensors dtype ("F32", "BF16", "I64", "U8", ...), shape, and its bytes.

    `data` is called once, when the tensor's turn has come, and gives contiguous little-endian bytes; they are dropped
    before the next tensor is asked for.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], bytes | bytearray | memoryview]

    @cached_property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Entry:
    """A tensor in a file; its bytes are [start, stop) of the file, counted from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class Header:
    """What a file says it holds; checked against its size. `tensors` are in the order of their bytes."""

    tensors: dict[str, Entry]
    metadata: dict[str, str]
    data_offset: int
    file_bytes: int


def encode_header(tensors: Mapping[str, TensorBytes], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """The first bytes of a file with these tensors, up to the data, and the order in which the data follow."""
    order = sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name))
    table: dict[str, object] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for name in order:
        if name == METADATA:
            raise ValueError(f"a tensor cannot be named {METADATA}")
        tensor = tensors[name]
        stop = offset + tensor.nbytes
        table[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % _PREFIX)
    if len(text) > MAX_HEADER:
        raise ValueError(f"the header of {len(tensors):,} tensors has {len(text):,} bytes; at most {MAX_HEADER:,} fit")
    return len(text).to_bytes(_PREFIX, "little") + text, order


def planned_bytes(tensors: Mapping[str, TensorBytes], metadata: Mapping[str, str]) -> int:
    """Size of the file that `write_safetensors` would write."""
    return len(encode_header(tensors, metadata)[0]) + sum(tensor.nbytes for tensor in tensors.values())


def write_safetensors(
    path: Path, tensors: Mapping[str, TensorBytes], metadata: Mapping[str, str], *, fsync: bool = True
) -> FileDigest:
    """Write a new file and hash it on the way. The same tensors and metadata give the same bytes, always.

    OSError as the system gives it (FileExistsError if the name is taken); a part of the file may be left then.
    """
    head, order = encode_header(tensors, metadata)
    with closing(NewFile(path, fsync=fsync)) as file:
        file.write(head)
        for name in order:
            data = memoryview(tensors[name].data())
            assert data.nbytes == tensors[name].nbytes, f"{name}: {data.nbytes} bytes for {tensors[name]}"
            file.write(data)
        return file.finish()


def read_header(path: Path) -> Header:
    """The header of a file. CheckpointError if it is not a regular file (a link is none) or not a sound one."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
    with regular_file(descriptor, str(path)) as file:
        return read_header_of(file, str(path))[0]


def regular_file(descriptor: int, where: str) -> BinaryIO:
    """An open descriptor as an unbuffered file; closed, and CheckpointError, if it is a folder, a pipe or a device."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{where}: is not a regular file")
    return open(descriptor, "rb", buffering=0)


def read_header_of(file: BinaryIO, where: str) -> tuple[Header, bytes]:
    """The header of an open file that stands at its beginning, and the bytes read; the file then stands at its data.

    Allocates in proportion to the header that is really there, whatever the file claims. `where` names it in errors.
    """
    size = os.fstat(file.fileno()).st_size
    head = read_exactly(file, min(_PREFIX, size), where)
    if len(head) < _PREFIX:
        raise CheckpointError(f"{where}: {len(head)} bytes found; a safetensors file has at least {_PREFIX + 2}")
    length = int.from_bytes(head, "little")
    data_offset = _PREFIX + length
    if length > MAX_HEADER or data_offset > size:
        raise CheckpointError(
            f"{where}: its header would be {length:,} bytes long; the file has {size:,} bytes, "
            f"and headers of up to {MAX_HEADER:,} are read"
        )
    raw = read_exactly(file, length, where)
    try:
        entries, metadata = parse_header(raw, size - data_offset)
    except ValueError as error:
        raise CheckpointError(f"{where}: header: {error}") from None
    header = Header(_placed(entries, data_offset), metadata, data_offset, size)
    return header, bytes(head + raw)


def _placed(entries: list[RawEntry], data_offset: int) -> dict[str, Entry]:
    return {
        entry.name: Entry(entry.dtype, entry.shape, data_offset + entry.start, data_offset + entry.stop)
        for entry in entries
    }


def read_exactly(file: BinaryIO, count: int, where: str) -> bytearray:
    """The next `count` bytes of a file; CheckpointError if it ends before (it may have been cut while being read)."""
    data = bytearray(count)
    fill(file, memoryview(data), where)
    return data


def fill(file: BinaryIO, target: memoryview, where: str) -> None:
    """Read into `target` (bytes, writable) until it is full; CheckpointError if the file ends before, or the disk
    cannot read it."""
    done = 0
    while done < target.nbytes:
        try:
            count = file.readinto(target[done:])  # type: ignore[attr-defined]
        except OSError as error:
            raise CheckpointError(f"{where}: cannot be read: {error.strerror}") from error
        if not count:
            raise CheckpointError(f"{where}: ended {target.nbytes - done:,} bytes early while being read")
        done += count


def read_tensor(file: BinaryIO, entry: Entry, where: str = "file") -> bytearray:
    """The bytes of one tensor of an open file."""
    file.seek(entry.start)
    return read_exactly(file, entry.nbytes, where)


def stored_tensors(file: BinaryIO, where: str) -> dict[str, TensorBytes]:
    """The tensors of an open file that stands at its beginning, to be written into another one while it is open."""

    def stored(entry: Entry) -> TensorBytes:
        return TensorBytes(entry.dtype, entry.shape, lambda: read_tensor(file, entry, where))

    return {name: stored(entry) for name, entry in read_header_of(file, where)[0].tensors.items()}
