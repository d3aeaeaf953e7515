"""Hashes of files as a manifest has them: "blake3:<64 hex>" of all that is written, "sha256:<64 hex>" in format 1.

Every byte of a checkpoint is hashed when it is written and again when it is read. BLAKE3 is cryptographic as SHA-256
is, and runs at several times its speed on one core.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any, Protocol

from blake3 import blake3

NEW = "blake3"
"""What new files are hashed by."""

_TEXT = re.compile(r"([a-z0-9_-]{1,40}):([0-9a-f]{64})\Z")


class _Digest(Protocol):
    def update(self, data: bytes | bytearray | memoryview, /) -> object: ...

    def hexdigest(self) -> str: ...


_ALGORITHMS: dict[str, Callable[[], _Digest]] = {NEW: blake3, "sha256": hashlib.sha256}


class FileHash:
    """The hash of the bytes that it was given so far."""

    def __init__(self, algorithm: str = NEW) -> None:
        self._algorithm, self._digest = algorithm, _ALGORITHMS[algorithm]()

    @classmethod
    def like(cls, text: str) -> FileHash:
        """A hash of nothing yet, by the algorithm of `text`, in which `hash_problem` finds none."""
        return cls(text.partition(":")[0])

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add `data`."""
        self._digest.update(data)

    @property
    def text(self) -> str:
        """ "<algorithm>:<hex>"."""
        return f"{self._algorithm}:{self._digest.hexdigest()}"


def hash_problem(text: Any) -> str | None:
    """What keeps `text`, from a manifest, from being a hash that can be compared, or None."""
    found = _TEXT.match(text) if isinstance(text, str) else None
    if found is None:
        return "hash is missing or malformed"
    if found[1] not in _ALGORITHMS:
        return f"hash is by {found[1]}; this shardrun knows {', '.join(_ALGORITHMS)}"
    return None


def changed(expected: str, found: str) -> str:
    """The words about a file whose hash is another one than its manifest says."""
    return f"{expected} expected, {found} found: its content was changed"
