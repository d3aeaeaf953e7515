"""What a session of a draft holds and sends on each rank of any world, in bytes, and what its records consist of.

Integers only: layouts and the forms of state are those that the session itself allocates by, and nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from shardrun.comm.slices import sent_bytes
from shardrun.optim.grouped import merged_options
from shardrun.optim.state import MASTER, StateSpec
from shardrun.optim.stepper import Shapes
from shardrun.optim.table import Elementwise
from shardrun.shard.flat_buffer import DTYPES
from shardrun.shard.layout import Bucket, FlatLayout, Fragment, Space
from shardrun.step.draft import Draft


@dataclass(frozen=True)
class Held:
    """Bytes on one rank."""

    pending: int
    """FP32 gradients of the window, whole; new slices are staged on their memory."""
    in_step: int
    """Reduced slices, their casts, and the copies in which matrix optimizers make their proposals."""
    state: int
    """Optimizer state and FP32 masters, padding included."""
    reduce_sent: int
    """Sent to the other ranks in one step, see `sent_bytes`."""
    gather_sent: int


@dataclass(frozen=True)
class _Stored:
    """What is kept for the parameters of one canonical space."""

    space: Space
    leaf: torch.dtype
    spec: StateSpec | None
    """None: only a first update shows it."""
    whole: bool
    """Whether tensors are stepped by themselves, and not in slices with padding."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return DTYPES[self.space.dtype]

    @property
    def has_master(self) -> bool:
        """Whether FP32 masters stand beside the parameters."""
        return self.leaf != self.dtype

    def state_nbytes(self, numel: int) -> int:
        """Bytes of the state of `numel` elements, without masters."""
        return 0 if self.spec is None else self.spec.nbytes(numel)

    def recorded(self, fragment: Fragment, shape: tuple[int, ...]) -> Shapes:
        """Names and forms in a record, of a fragment of a parameter of `shape` once it was updated."""
        numel = fragment.stop - fragment.start
        forms = {} if self.spec is None else self.spec.recorded(shape if self.whole else (numel,))
        forms |= {MASTER: ((numel,), torch.float32)} if self.has_master else {}
        return {f"{fragment.path}/{name}": form for name, form in forms.items()}


class Footprint:
    """A draft on `world_size` ranks."""

    def __init__(self, draft: Draft, world_size: int) -> None:
        self.draft = draft
        self.world_size = world_size
        self.layout: FlatLayout = draft.layout(world_size)
        self._stored = [_stored(draft, space) for space in self.layout.spaces]

    @property
    def unknown(self) -> list[str]:
        """Names of optimizers whose state only a first update shows: it is not counted."""
        shares = [self.draft.share_of(stored.space.option_group)[0] for stored in self._stored if stored.spec is None]
        return sorted({share.kind.name for share in shares})

    @cached_property
    def _buckets(self) -> list[tuple[_Stored, Bucket, list[int]]]:
        return [(one, bucket, bucket.splits(self.world_size)) for one in self._stored for bucket in one.space.buckets]

    @cached_property
    def _pending(self) -> int:
        return 4 * sum(sum(splits) for _, _, splits in self._buckets)

    def held(self, rank: int) -> Held:
        """What `rank` of the group holds and sends."""
        in_step = state = reduce_sent = gather_sent = 0
        for stored, bucket, splits in self._buckets:
            numel = splits[rank]
            in_step += numel * (4 + (0 if stored.leaf == torch.float32 else stored.leaf.itemsize))
            state += 4 * numel if stored.has_master else 0
            if stored.whole:
                owned = sum(one.stop - one.start for one in stored.space.fragments(bucket, rank, self.world_size))
                state += stored.state_nbytes(owned)
                in_step += owned * stored.leaf.itemsize + stored.state_nbytes(owned)
            elif numel and stored.space.holds(bucket, rank, self.world_size):
                state += stored.state_nbytes(numel)
            reduced, gathered = sent_bytes(splits, rank, stored.dtype.itemsize)
            reduce_sent += reduced
            gather_sent += gathered
        return Held(self._pending, in_step, state, reduce_sent, gather_sent)

    def fragments(self, rank: int) -> Iterator[tuple[_Stored, Fragment]]:
        """What `rank` has state of."""
        for stored, bucket, _ in self._buckets:
            for fragment in stored.space.fragments(bucket, rank, self.world_size):
                yield stored, fragment

    def record(self, rank: int) -> tuple[dict[str, list[int]], Shapes]:
        """The fragments of `rank`'s record, path -> [start, stop], and the forms of its tensors by name."""
        shapes = self._shapes
        fragments: dict[str, list[int]] = {}
        forms: Shapes = {}
        for stored, fragment in self.fragments(rank):
            fragments[fragment.path] = [fragment.start, fragment.stop]
            forms |= stored.recorded(fragment, shapes[fragment.path])
        return fragments, forms

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {path: spec.shape for path, spec in self.draft.specs.items()}


def _stored(draft: Draft, space: Space) -> _Stored:
    share, group = draft.share_of(space.option_group)
    leaf = torch.float32 if draft.masters else DTYPES[space.dtype]
    whole = not isinstance(share.kind, Elementwise)
    spec = None
    if not (whole and share.kind.declared is not None):
        spec = share.kind.spec(merged_options(share.options, share.groups)[group], torch.empty(0, dtype=leaf))
    return _Stored(space, leaf, spec, whole)
