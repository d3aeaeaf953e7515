"""Files copied by byte ranges, both ends hashed on the way, in the memory of one chunk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrun.checkpoint.safe_files import open_inside
from shardrun.errors import CheckpointError
from shardrun.records.durable import make_folder
from shardrun.records.hashes import FileHash, changed
from shardrun.records.header import read_exactly, read_header_of
from shardrun.records.new_file import CHUNK, NewFile


class Source:
    """A registered file of a checkpoint, read once from its beginning to its end; what is left out is hashed too.

    CheckpointError where it is not what the manifest says; for the hash that is known only after `finish`.
    """

    def __init__(self, checkpoint: Path, entry: Mapping[str, Any]) -> None:
        self._where, self._wanted = str(checkpoint / entry["path"]), entry["hash"]
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
        self._hash = FileHash.like(self._wanted)
        self._hash.update(self.head)

    def copy(self, start: int, stop: int, target: NewFile) -> None:
        """Give the bytes [start, stop) of the file to `target`; they stand behind what was given before."""
        if start < self._at:
            raise CheckpointError(f"{self._where}: its tensors do not stand in the order in which shardrun writes them")
        self._read_to(start, None)
        self._read_to(stop, target)

    def finish(self) -> None:
        """Read the rest, and compare the hash of all."""
        self._read_to(self.header.file_bytes, None)
        if (found := self._hash.text) != self._wanted:
            raise CheckpointError(f"{self._where}: {changed(self._wanted, found)}")

    def close(self) -> None:
        """Close it, finished or not."""
        self._file.close()

    def _read_to(self, stop: int, target: NewFile | None) -> None:
        while self._at < stop:
            part = read_exactly(self._file, min(CHUNK, stop - self._at), self._where)
            self._hash.update(part)
            if target is not None:
                target.write(part)
            self._at += len(part)


@dataclass(frozen=True)
class Copier:
    """Copies registered files of the folder `checkpoint`, or ranges of them, into the folder `staging`."""

    checkpoint: Path
    staging: Path

    def source(self, entry: Mapping[str, Any]) -> contextlib.closing[Source]:
        """A file of the checkpoint by its entry in the manifest, for a `with` block."""
        return contextlib.closing(Source(self.checkpoint, entry))

    def target(self, relative: str, head: bytes, *, hashed: bool = True) -> contextlib.closing[NewFile]:
        """A new file that begins with `head`, for a `with` block."""
        path = self.staging / relative
        make_folder(path.parent, exist_ok=True)
        file = NewFile(path, hashed=hashed)
        file.write(head)
        return contextlib.closing(file)

    def copy_file(self, entry: Mapping[str, Any]) -> None:
        """Copy a file as it is; it is durable then, and its hash compared."""
        with self.source(entry) as source, self.target(entry["path"], source.head, hashed=False) as target:
            source.copy(source.header.data_offset, source.header.file_bytes, target)
            source.finish()
            target.finish()

    def check_file(self, entry: Mapping[str, Any]) -> None:
        """Read a file of which nothing is copied, for its hash."""
        with self.source(entry) as source:
            source.finish()


def check_files(checkpoint: Path, manifest: Mapping[str, Any]) -> None:
    """Read every registered file; CheckpointError naming the first that is not what the manifest says."""
    for entry in manifest["files"]:
        with contextlib.closing(Source(checkpoint, entry)) as source:
            source.finish()
