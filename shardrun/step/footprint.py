"""What a session of a draft holds and sends on each rank of any world, in bytes, and what its records consist of.

Integers only: layouts and the forms of state are those that the session itself allocates by, and nothing is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from shardrun.comm.slices import sent_bytes
from shardrun.optim.grouped import merged_options
from shardrun.optim.state import MASTER, StateSpec
from shardrun.optim.stepper import Shapes
from shardrun.optim.table import Elementwise
from shardrun.shard.contract import ParameterSpec
from shardrun.shard.flat_buffer import DTYPES
from shardrun.shard.layout import Bucket, FlatLayout, Space
from shardrun.shard.streamed_gradients import slot_numel
from shardrun.step.draft import CutDraft, Draft


@dataclass(frozen=True)
class RankBytes:
    """What one rank holds of a session, and sends in a step, in bytes."""

    pending: int
    """FP32 gradients of the window, whole; new slices are staged on their memory. Or the slots for streamed ones."""
    in_step: int
    """Reduced slices, their casts, the copies in which matrix optimizers make their proposals; and where gradients are
    streamed the new slices of the other ranks."""
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

    def state_nbytes(self, numel: int, owned: int) -> int:
        """Bytes of the state of a slice of `numel` elements, `owned` of them of parameters; masters left out."""
        if self.spec is None or not owned:
            return 0
        return self.spec.nbytes(owned if self.whole else numel)

    def owned(self, bucket: Bucket, rank: int, world_size: int) -> int:
        """Elements of a rank's slice that are those of parameters; of slices that are stepped, with gaps."""
        if self.whole:
            return sum(one.stop - one.start for one in self.space.fragments(bucket, rank, world_size))
        low, high = bucket.extent(rank, world_size)
        return high - low

    def recorded(self, parameter: ParameterSpec, numel: int) -> Shapes:
        """Names and forms in a record, of `numel` elements of a parameter."""
        forms = {} if self.spec is None else self.spec.recorded(parameter.shape if self.whole else (numel,))
        forms |= {MASTER: ((numel,), torch.float32)} if self.has_master else {}
        return {f"{parameter.path}/{name}": form for name, form in forms.items()}


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
    def held(self) -> list[RankBytes]:
        """What each rank of the group holds and sends."""
        sizes = [sum(bucket.splits(self.world_size)) for one in self._stored for bucket in one.space.buckets]
        streams = isinstance(self.draft, CutDraft) and self.draft.streams
        alone = streams and self.world_size == 1  # the gradients are the slices
        pending = 4 * (slot_numel(sizes, self.world_size) if streams else sum(sizes))
        sums = np.zeros((4, self.world_size), dtype=np.int64)
        for stored in self._stored:
            width, copied = stored.leaf.itemsize, stored.leaf != torch.float32
            for bucket in stored.space.buckets:
                splits = bucket.splits(self.world_size)
                owned = [stored.owned(bucket, rank, self.world_size) for rank in range(self.world_size)]
                kept = np.array([*map(stored.state_nbytes, splits, owned)])
                sums[0] += np.array(splits) * (4 * (not alone) + copied * width)
                sums[0] += stored.whole * (np.array(owned) * width + kept)
                sums[0] += streams * (sum(splits) - np.array(splits)) * stored.dtype.itemsize
                sums[1] += kept + 4 * stored.has_master * np.array(splits)
                sums[2:] += np.array(sent_bytes(splits, stored.dtype.itemsize)).T
        return [RankBytes(pending, *one) for one in sums.T.tolist()]

    def fragments(self, rank: int) -> dict[str, list[int]]:
        """Path -> [start, stop], of all that `rank` has state of."""
        return {path: list(extent) for path, extent in self.layout.fragments(rank, self.world_size).items()}

    def recorded(self, path: str, numel: int) -> Shapes:
        """Names and forms of the tensors in a record of so many elements of a parameter, once it was updated."""
        return self._stored_of[path].recorded(self.draft.specs[path], numel)

    @cached_property
    def _stored_of(self) -> dict[str, _Stored]:
        return {placed.path: stored for stored in self._stored for placed in stored.space.parameters}


def _stored(draft: Draft, space: Space) -> _Stored:
    share, group = draft.share_of(space.option_group)
    leaf = torch.float32 if draft.masters else DTYPES[space.dtype]
    whole = not isinstance(share.kind, Elementwise)
    spec = None
    if not (whole and share.kind.declared is not None):
        spec = share.kind.spec(merged_options(share.options, share.groups)[group], torch.empty(0, dtype=leaf))
    return _Stored(space, leaf, spec, whole)
