"""Files copied by byte ranges, both ends hashed on the way, in the memory of one chunk."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrun.checkpoint.safe_files import open_inside
from shardrun.errors import CheckpointError
from shardrun.records.durable import create_file, make_folder, sync_file, write_all
from shardrun.records.header import FileDigest, read_exactly, read_header_of

CHUNK = 1 << 20
"""Bytes that are in memory at a time; both threads still find them in the cache."""


class Target:
    """A new file that is written from its beginning to its end, and `hashed` on the way if its hash is not known."""

    def __init__(self, path: Path, head: bytes, *, hashed: bool = True) -> None:
        make_folder(path.parent, exist_ok=True)
        self._path = path
        self._digest = hashlib.sha256() if hashed else None
        self._size = 0
        self._descriptor = create_file(path)
        self.write(memoryview(head))

    def write(self, data: memoryview) -> None:
        """Append `data`."""
        if self._digest is not None:
            self._digest.update(data)
        write_all(self._descriptor, data, self._path)
        self._size += data.nbytes

    def finish(self) -> FileDigest:
        """Make the file durable; its size and hash."""
        assert self._digest is not None
        self.sync()
        return FileDigest(self._size, self._digest.hexdigest())

    def sync(self) -> None:
        """Make the file durable."""
        sync_file(self._descriptor, self._path)

    def close(self) -> None:
        """Close it, finished or not."""
        os.close(self._descriptor)


class Source:
    """A registered file of a checkpoint, read once from its beginning to its end; what is left out is hashed too.

    CheckpointError where it is not what the manifest says; for the hash that is known only after `finish`.
    """

    def __init__(self, checkpoint: Path, entry: Mapping[str, Any], hasher: Executor) -> None:
        self._where, self._sha256 = str(checkpoint / entry["path"]), entry["sha256"]
        self._file = open_inside(checkpoint, entry["path"])
        try:
            size = os.fstat(self._file.fileno()).st_size
            if size != entry["bytes"]:
                raise CheckpointError(f"{self._where}: {entry['bytes']:,} bytes expected, {size:,} found")
            self.header, self.head = read_header_of(self._file, self._where)
        except BaseException:
            self._file.close()
            raise
        self._at = self.header.data_offset
        self._digest = hashlib.sha256(self.head)
        self._hasher, self._hashed = hasher, Future[None]()
        self._hashed.set_result(None)

    def copy(self, start: int, stop: int, target: Target) -> None:
        """Give the bytes [start, stop) of the file to `target`; they stand behind what was given before."""
        if start < self._at:
            raise CheckpointError(f"{self._where}: its tensors do not stand in the order in which shardrun writes them")
        self._read_to(start, None)
        self._read_to(stop, target)

    def finish(self) -> None:
        """Read the rest, and compare the hash of all."""
        self._read_to(self.header.file_bytes, None)
        self._hashed.result()
        if (found := self._digest.hexdigest()) != self._sha256:
            raise CheckpointError(
                f"{self._where}: sha256 {self._sha256} expected, {found} found: its content was changed"
            )

    def close(self) -> None:
        """Close it, finished or not."""
        self._file.close()

    def _read_to(self, stop: int, target: Target | None) -> None:
        while self._at < stop:
            part = memoryview(read_exactly(self._file, min(CHUNK, stop - self._at), self._where))
            self._hashed.result()
            self._hashed = self._hasher.submit(self._digest.update, part)
            if target is not None:
                target.write(part)
            self._at += len(part)


@dataclass(frozen=True)
class Copier:
    """Copies registered files of the folder `checkpoint`, or ranges of them, into the folder `staging`.

    `hasher` has one thread: what is read is hashed there, while what is written is hashed and written here.
    """

    checkpoint: Path
    staging: Path
    hasher: Executor

    def source(self, entry: Mapping[str, Any]) -> contextlib.closing[Source]:
        """A file of the checkpoint by its entry in the manifest, for a `with` block."""
        return contextlib.closing(Source(self.checkpoint, entry, self.hasher))

    def target(self, relative: str, head: bytes, *, hashed: bool = True) -> contextlib.closing[Target]:
        """A new file that begins with `head`, for a `with` block."""
        return contextlib.closing(Target(self.staging / relative, head, hashed=hashed))

    def copy_file(self, entry: Mapping[str, Any]) -> None:
        """Copy a file as it is; it is durable then, and its hash compared."""
        with self.source(entry) as source, self.target(entry["path"], source.head, hashed=False) as target:
            source.copy(source.header.data_offset, source.header.file_bytes, target)
            source.finish()
            target.sync()

    def check_file(self, entry: Mapping[str, Any]) -> None:
        """Read a file of which nothing is copied, for its hash."""
        with self.source(entry) as source:
            source.finish()


def check_files(checkpoint: Path, manifest: Mapping[str, Any]) -> None:
    """Read every registered file; CheckpointError naming the first that is not what the manifest says."""
    with ThreadPoolExecutor(1) as hasher:
        for entry in manifest["files"]:
            with contextlib.closing(Source(checkpoint, entry, hasher)) as source:
                source.finish()
