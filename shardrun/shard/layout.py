"""Where each element lives, in integers only.

[Note: canonical space] Per (dtype, option group) the trainable parameters stand one after another, in the root's
order, at offsets that are multiples of 256. This space depends neither on world size nor on buckets. Buckets are
ranges of it; each is cut into `world_size` equal slices, padded at its tail in memory only. Cuts at multiples of 256
keep fused and block-wise kernels at the bits of the uncut run (odd cuts change a fused AdamW on the CPU by 1e-10).
Where tensors have to stay whole (ZeRO-1), a bucket's tensors stand in the order of their owners, and a slice is what
its rank owns.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

ALIGN = 256


def align(numel: int) -> int:
    """The next multiple of 256."""
    return -(-numel // ALIGN) * ALIGN


@dataclass(frozen=True)
class Entry:
    """A trainable parameter that is to be placed."""

    path: str
    numel: int
    dtype: str
    option_group: int


@dataclass(frozen=True)
class Placed:
    """A parameter at [offset, offset + numel) of its canonical space."""

    path: str
    offset: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """The range [start, stop) of a canonical space; both are multiples of 256."""

    start: int
    stop: int
    sizes: tuple[int, ...] = ()
    """Elements of each rank's slice where whole tensors stand with their owners; empty: equal slices."""

    def splits(self, world_size: int) -> list[int]:
        """Elements of each rank's slice, multiples of 256; equal slices are padded at the bucket's tail."""
        return list(self.sizes) or [align(-(-(self.stop - self.start) // world_size))] * world_size

    def extent(self, rank: int, world_size: int) -> tuple[int, int]:
        """Where `rank`'s slice begins and ends in the canonical space, both multiples of 256; equal: it has no element.

        A slice of padding alone has none; any other has some, as every 256 elements of a space hold one at least.
        """
        if self.sizes:
            low = self.start + sum(self.sizes[:rank])
            return low, low + self.sizes[rank]
        size = align(-(-(self.stop - self.start) // world_size))
        low = min(self.start + rank * size, self.stop)
        return low, min(low + size, self.stop)


@dataclass(frozen=True)
class Fragment:
    """The elements [start, stop) of the flattened parameter `path`, at `offset` of a rank's slice of one bucket."""

    path: str
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Space:
    """One canonical space: all trainable parameters of one dtype and one option group."""

    dtype: str
    option_group: int
    parameters: tuple[Placed, ...]
    buckets: tuple[Bucket, ...]

    def fragments(self, bucket: Bucket, rank: int, world_size: int) -> Iterator[Fragment]:
        """The fragments in `rank`'s slice of `bucket`, in canonical order."""
        low, high = bucket.extent(rank, world_size)
        if low == high:
            return
        for number in range(max(0, bisect_right(self._offsets, low) - 1), len(self.parameters)):
            placed = self.parameters[number]
            start, stop = max(low, placed.offset), min(high, placed.offset + placed.numel)
            if start < stop:
                yield Fragment(placed.path, start - placed.offset, stop - placed.offset, start - low)
            elif placed.offset >= high:
                break

    @cached_property
    def _offsets(self) -> list[int]:
        return [placed.offset for placed in self.parameters]

    def memory_offsets(self, world_size: int) -> list[int]:
        """Where each bucket begins in memory, and the total at the end: buckets stand padded, one after another."""
        offsets = [0]
        for bucket in self.buckets:
            offsets.append(offsets[-1] + sum(bucket.splits(world_size)))
        return offsets

    def places(self, world_size: int) -> Iterator[tuple[Placed, int]]:
        """Each parameter with the element of memory at which it begins."""
        begins = self.memory_offsets(world_size)
        number = 0
        for placed in self.parameters:
            while placed.offset >= self.buckets[number].stop:
                number += 1
            yield placed, begins[number] + placed.offset - self.buckets[number].start


@dataclass(frozen=True)
class FlatLayout:
    """The canonical spaces of a session. Computed by the group's root, broadcast, and stored in the record."""

    spaces: tuple[Space, ...]

    def to_json(self) -> list[dict[str, Any]]:
        """As plain JSON."""
        plain: list[dict[str, Any]] = json.loads(json.dumps([asdict(space) for space in self.spaces]))
        for bucket in (bucket for space in plain for bucket in space["buckets"] if not bucket["sizes"]):
            del bucket["sizes"]  # equal slices follow from the range
        return plain

    @staticmethod
    def from_json(items: list[dict[str, Any]]) -> FlatLayout:
        """The inverse of `to_json`."""
        return FlatLayout(
            tuple(
                Space(
                    i["dtype"],
                    i["option_group"],
                    tuple(Placed(**placed) for placed in i["parameters"]),
                    tuple(Bucket(b["start"], b["stop"], tuple(b.get("sizes", ()))) for b in i["buckets"]),
                )
                for i in items
            )
        )

    @property
    def digest(self) -> str:
        """sha256 (hex) of the layout."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def fragments(self, rank: int, world_size: int) -> dict[str, tuple[int, int]]:
        """Path -> (start, stop) in elements, for all parameters of which `rank` holds a part."""
        return {
            fragment.path: (fragment.start, fragment.stop)
            for space in self.spaces
            for bucket in space.buckets
            for fragment in space.fragments(bucket, rank, world_size)
        }


def plan_layout(entries: Iterable[Entry], bucket_numel: int) -> FlatLayout:
    """Place `entries` in their order, to be cut into equal slices (ZeRO-2, data parallel).

    A bucket closes as soon as it holds `bucket_numel` elements or more: cuts are between parameters only, so every
    parameter is one contiguous range of memory.
    """
    spaces = []
    for (dtype, option_group), members in by_space(entries).items():
        parameters, buckets, offset = [], [], 0
        for batch in batches(members, bucket_numel):
            begin = offset
            for entry in batch:
                parameters.append(Placed(entry.path, offset, entry.numel))
                offset += align(entry.numel)
            buckets.append(Bucket(begin, offset))
        spaces.append(Space(dtype, option_group, tuple(parameters), tuple(buckets)))
    return FlatLayout(tuple(spaces))


def closing_numel(spaces: Sequence[Space]) -> int:
    """A `bucket_numel` at which `plan_layout` closes buckets as they are closed here."""
    closed = [bucket.stop - bucket.start for space in spaces for bucket in space.buckets[:-1]]
    return min(closed, default=max((space.buckets[-1].stop for space in spaces), default=1))


def by_space(entries: Iterable[Entry]) -> dict[tuple[str, int], list[Entry]]:
    """The entries of each space, (dtype, option group), in their order."""
    grouped: dict[tuple[str, int], list[Entry]] = {}
    for entry in entries:
        grouped.setdefault((entry.dtype, entry.option_group), []).append(entry)
    return grouped


def batches(members: Iterable[Entry], bucket_numel: int) -> Iterator[list[Entry]]:
    """The entries of a space by buckets: one closes as soon as it holds `bucket_numel` elements or more."""
    batch: list[Entry] = []
    filled = 0
    for entry in members:
        batch.append(entry)
        filled += align(entry.numel)
        if filled >= bucket_numel:
            yield batch
            batch, filled = [], 0
    if batch:
        yield batch
