"""A new file that is written from its beginning to its end."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from shardrun.records.durable import create_file, start_writing, sync_file, write_all
from shardrun.records.hashes import FileHash

CHUNK = 1 << 20
"""Bytes that are read, hashed or written at a time: they are still in the processor's cache at the second use."""
_STARTED = 8 << 20


@dataclass(frozen=True)
class FileDigest:
    """Size and hash ("blake3:<hex>") of a whole file."""

    bytes: int
    hash: str


class NewFile:
    """A file that nobody had, hashed while it is written; for a `with contextlib.closing(...)` block.

    OSError as the system gives it, FileExistsError if the name is taken; a part of the file may be left then. The disk
    begins with what was written while more is hashed, so that little is left to wait for in `finish`; not so without
    `fsync`. Not `hashed`: the hash is known from elsewhere.
    """

    def __init__(self, path: Path, *, hashed: bool = True, fsync: bool = True) -> None:
        self._path, self._fsync = path, fsync
        self._hash = FileHash() if hashed else None
        self._size = self._started = 0
        self._descriptor = create_file(path)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`."""
        rest = memoryview(data)
        while rest.nbytes:
            chunk, rest = rest[:CHUNK], rest[CHUNK:]
            if self._hash is not None:
                self._hash.update(chunk)
            write_all(self._descriptor, chunk, self._path)
            self._size += chunk.nbytes
            if self._fsync and self._size - self._started >= _STARTED:
                start_writing(self._descriptor, self._started, self._size - self._started, self._path)
                self._started = self._size

    def finish(self) -> FileDigest:
        """Size and hash ("" if it was not asked for); the file is durable then."""
        if self._fsync:
            sync_file(self._descriptor, self._path)
        return FileDigest(self._size, "" if self._hash is None else self._hash.text)

    def close(self) -> None:
        """Close it, finished or not."""
        os.close(self._descriptor)
