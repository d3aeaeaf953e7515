"""Where each element lives, in integers only.

[Note: canonical space] Per (dtype, option group) the trainable parameters stand one after another, in the root's
order, at offsets that are multiples of 256. This space depends neither on world size nor on buckets. Buckets are
ranges of it; each is cut into `world_size` equal slices, padded at its tail in memory only. Cuts at multiples of 256
keep fused and block-wise kernels at the bits of the uncut run (odd cuts change a fused AdamW on the CPU by 1e-10).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
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

    def slice_numel(self, world_size: int) -> int:
        """Elements of one rank's slice, a multiple of 256."""
        return align(-(-(self.stop - self.start) // world_size))


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
        numel = bucket.slice_numel(world_size)
        low = bucket.start + rank * numel
        high = min(low + numel, bucket.stop)
        for placed in self.parameters:
            start, stop = max(low, placed.offset), min(high, placed.offset + placed.numel)
            if start < stop:
                yield Fragment(placed.path, start - placed.offset, stop - placed.offset, start - low)

    def memory_offsets(self, world_size: int) -> list[int]:
        """Where each bucket begins in memory, and the total at the end: buckets stand padded, one after another."""
        offsets = [0]
        for bucket in self.buckets:
            offsets.append(offsets[-1] + bucket.slice_numel(world_size) * world_size)
        return offsets


@dataclass(frozen=True)
class FlatLayout:
    """The canonical spaces of a session. Computed by the group's root, broadcast, and stored in the record."""

    spaces: tuple[Space, ...]

    def to_json(self) -> list[dict[str, Any]]:
        """As plain JSON."""
        plain: list[dict[str, Any]] = json.loads(json.dumps([asdict(space) for space in self.spaces]))
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
                    tuple(Bucket(**bucket) for bucket in i["buckets"]),
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
    """Place `entries` in their order; a bucket closes as soon as it holds `bucket_numel` elements or more.

    Buckets are cut between parameters only, so every parameter is one contiguous range of memory.
    """
    grouped: dict[tuple[str, int], list[Entry]] = {}
    for entry in entries:
        grouped.setdefault((entry.dtype, entry.option_group), []).append(entry)
    spaces = []
    for (dtype, option_group), members in grouped.items():
        parameters, buckets, offset, begin = [], [], 0, 0
        for entry in members:
            parameters.append(Placed(entry.path, offset, entry.numel))
            offset += align(entry.numel)
            if offset - begin >= bucket_numel:
                buckets.append(Bucket(begin, offset))
                begin = offset
        if begin < offset:
            buckets.append(Bucket(begin, offset))
        spaces.append(Space(dtype, option_group, tuple(parameters), tuple(buckets)))
    return FlatLayout(tuple(spaces))
