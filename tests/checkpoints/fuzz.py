"""Mutated headers and manifests: each is read, or refused with a CheckpointError, soon and in little memory.

    python -m tests.checkpoints.fuzz [--count 1000000 --seed 1]

Half of the inputs are whole files of safetensors, mutated byte by byte. The others are manifests: mutated byte by byte,
or changed in what they say and then sealed, so that the digest is right and the fields themselves are looked at.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shardrun.checkpoint.manifest import parse_manifest, seal
from shardrun.errors import CheckpointError
from shardrun.records.header import encode_header, read_header_of
from tests.checkpoints.mutations import mutated_bytes, mutated_value
from tests.checkpoints.saver import plan

MOST_MEMORY = 64 << 20
"""Bytes that may be asked for beyond what the process has when it begins; the inputs have some kilobytes."""
HANG_S = 5


@dataclass
class Found:
    """What came of the inputs: how many of each kind ended how, the slowest, and what went wrong (the input's number,
    its first bytes and the error)."""

    ends: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Fuzz:
    """Inputs follow from the seed and their number alone, so that one can be made again."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        files = [file for step in (1, 2) for file in plan(step).files]
        self._headers = []
        for file in files:
            head, order = encode_header(file.tensors, file.metadata)
            self._headers.append(head + b"".join(bytes(file.tensors[name].data()) for name in order))
        self._documents = [_document(step) for step in (1, 2)]
        self._manifests = [seal(document) for document in self._documents]

    def run(self, count: int, found: Found) -> None:
        """So many inputs."""
        kinds: list[tuple[str, Callable[[random.Random], bytes], Callable[[bytes], Any]]] = [
            ("header", self._header, self._read_header),
            ("manifest", self._manifest, parse_manifest),
            ("header", self._header, self._read_header),
            ("sealed manifest", self._sealed, parse_manifest),
        ]
        with open(os.memfd_create("header"), "r+b", buffering=0) as self._file:
            for number in range(count):
                kind, make, read = kinds[number % len(kinds)]
                self._one(kind, number, make(random.Random(f"{self._seed} {number}")), read, found)

    def _one(self, kind: str, number: int, raw: bytes, read: Callable[[bytes], Any], found: Found) -> None:
        began, how = time.perf_counter(), "read"
        try:
            with _no_hang():
                read(raw)
        except CheckpointError as error:
            how = "refused"
            if not str(error):
                found.wrong.append(f"{kind} {number}: refused without a word: {raw[:200]!r}")
        except Exception as error:
            how = "wrong"
            found.wrong.append(f"{kind} {number}: {type(error).__name__}: {error}: {raw[:200]!r}")
        found.ends[f"{kind} {how}"] += 1
        found.slowest_s = max(found.slowest_s, time.perf_counter() - began)

    def _header(self, chance: random.Random) -> bytes:
        return mutated_bytes(chance.choice(self._headers), chance.choice(self._headers), chance)

    def _read_header(self, raw: bytes) -> None:
        self._file.seek(0)
        self._file.truncate(0)
        self._file.write(raw)
        self._file.seek(0)
        header, _ = read_header_of(self._file, "FILE")
        end = header.data_offset
        for entry in header.tensors.values():
            assert entry.start == end <= entry.stop
            end = entry.stop
        assert end == header.file_bytes == len(raw)

    def _manifest(self, chance: random.Random) -> bytes:
        return mutated_bytes(chance.choice(self._manifests), chance.choice(self._manifests), chance)

    def _sealed(self, chance: random.Random) -> bytes:
        changed = mutated_value(chance.choice(self._documents), chance)
        try:
            return seal(changed)
        except (ValueError, TypeError):  # what JSON cannot hold cannot stand in a file either
            return b""


def _document(step: int) -> dict[str, Any]:
    made = plan(step)
    files = [
        {**file.entry, "path": file.path, "bytes": file.nbytes, "hash": f"blake3:{'0' * 64}"} for file in made.files
    ]
    return {**made.sections, "sequence": step, "saved_at": 1, "files": files}


@contextmanager
def _no_hang() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"an input takes longer than {HANG_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def little_memory() -> Iterator[None]:
    """Whoever asks for more than MOST_MEMORY at a time gets a MemoryError meanwhile."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + MOST_MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def main() -> int:
    """Run it from the command line; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description="Fuzz the parsers of headers and manifests.")
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    began, found = time.monotonic(), Found()
    with little_memory():
        Fuzz(asked.seed).run(asked.count, found)
    for end, count in sorted(found.ends.items()):
        print(f"{count:>9,} {end}")
    print(f"slowest {1e3 * found.slowest_s:.1f} ms; peak memory {_peak_mb():.0f} MB; ", end="")
    print(f"{time.monotonic() - began:.0f} s; wrong: {len(found.wrong)}")
    print("\n".join(found.wrong[:20]))
    return 1 if found.wrong else 0


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
