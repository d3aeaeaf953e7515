"""The one seam through which gradients are reduced and parameters gathered: `native` collectives, or slice `exchange`.

A bucket is a flat tensor of one slice per rank, all equal unless `splits` says otherwise. Both seams sum in FP32;
`exchange` sums in rank order, so its bits depend neither on how elements fall into buckets nor on the backend's
algorithm, and on gloo it is 3 to 4 times faster than reduce-scatter and all-gather; where the ranks of a group share a
host, slices are read in place, which gives the same bits and sends none of them. The seam's name is part of a record's
numerics.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardrun.comm.group import Group
from shardrun.comm.shared_memory import SharedMemory
from shardrun.errors import UsageError

_SHORTEST_WAIT_S = 0.001  # gloo takes 0 for no limit
_CHUNK_NUMEL = 1 << 17  # what is summed at once: the sum stays in a core's cache until the last rank's part is added


class SliceSeam(Protocol):
    """How slices travel. Every rank of the group calls with buckets and splits of the same sizes in the same order."""

    name: str

    def reduce(self, bucket: Tensor, out: Tensor, splits: Sequence[int] | None = None, *, contributes: bool) -> None:
        """Sum `bucket` over ranks, this rank's slice to `out` (splits[rank],); `bucket` is not written."""

    def gather(
        self, bucket: Slices, own: Tensor, splits: Sequence[int] | None = None, source: Tensor | None = None
    ) -> None:
        """Write every rank's `own` (splits[rank],) into its slice of `bucket`.

        `source`: a bucket in shared memory in which `own` is put, or stands already, for the others to read; else
        that is `bucket`.
        """


Slices = Tensor | Sequence[Tensor]
"""A bucket, or its slices one by one."""


def slice_sizes(bucket: Slices, own: Tensor, splits: Sequence[int] | None, group: Group) -> list[int]:
    """Elements of each rank's slice of `bucket`; raises UsageError where they or `own` do not fit it."""
    if not isinstance(bucket, Tensor):
        splits = [piece.numel() for piece in bucket]
    total, size = bucket.numel() if isinstance(bucket, Tensor) else sum(splits or ()), group.size
    sizes = [total // size] * size if splits is None else [int(elements) for elements in splits]
    if len(sizes) != size or min(sizes) < 0 or sum(sizes) != total:
        raise UsageError(
            f"slices of {'equal' if splits is None else sizes} elements do not make up a bucket of {total} on "
            f"{size} ranks{group.suffix}; give one size per rank, none negative, that add up to the bucket"
        )
    if own.numel() != sizes[group.rank]:
        raise UsageError(
            f"the slice of {group.named(group.rank)} has {sizes[group.rank]} elements, its buffer {own.numel()}; "
            "they must be the same"
        )
    return sizes


def sent_bytes(splits: Sequence[int], itemsize: int) -> list[tuple[int, int]]:
    """By rank: bytes that it sends to all others to reduce a bucket of these slices in FP32, and to gather it.

    As `ExchangeSeam` does it; a ring of NCCL sends as much where slices are equal. `itemsize`: bytes of a gathered
    element. What a collective adds by itself is not counted.
    """
    others = len(splits) - 1
    if others == 0:
        return [(0, 0)]
    messages = [max(numel, 1) for numel in splits]  # in place of a slice without elements one is sent
    total = sum(messages)
    return [
        (4 * (total - message), others * max(numel * itemsize, 1))
        for numel, message in zip(splits, messages, strict=True)
    ]


def _cut(bucket: Slices, splits: Sequence[int] | None, world_size: int) -> list[Tensor]:
    """The slices of `bucket`, as views."""
    if not isinstance(bucket, Tensor):
        return list(bucket)
    flat = bucket.view(-1)
    sizes = [flat.numel() // world_size] * world_size if splits is None else splits
    return [flat.narrow(0, end - size, size) for size, end in zip(sizes, accumulate(sizes), strict=True)]


class Patience(Protocol):
    """Who knows how long a collective that begins now may take."""

    timeout_s: float


class _Scratch:
    """Buffers that are kept from step to step. A failed collective may be in them for ever, so no local holds one."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, torch.dtype], Tensor] = {}

    def take(self, place: int, numel: int, like: Tensor) -> Tensor:
        """(numel,) of the dtype and on the device of `like`; the same memory for the same place."""
        key = (place, like.dtype)
        held = self._held.get(key)
        if held is None or held.numel() < numel:
            held = self._held[key] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return held[:numel]


class ExchangeSeam:
    """isend/irecv of slices and a local sum in rank order (gloo)."""

    name = "exchange"

    def __init__(self, group: Group, clock: Patience) -> None:
        self._group = group
        self._clock = clock
        self._scratch = _Scratch()

    def reduce(self, bucket: Tensor, out: Tensor, splits: Sequence[int] | None = None, *, contributes: bool) -> None:
        me, size = self._group.rank, self._group.size
        slices = _cut(bucket, splits, size)
        if not contributes:
            zeros = self._scratch.take(me, max(piece.numel() for piece in slices), bucket).zero_()
            slices = [zeros[: piece.numel()] for piece in slices]
        received = [slices[rank] if rank == me else self._scratch.take(rank, out.numel(), out) for rank in range(size)]
        self._exchange(slices, received)
        out.copy_(received[0])
        for contribution in received[1:]:
            out.add_(contribution)

    def gather(
        self, bucket: Slices, own: Tensor, splits: Sequence[int] | None = None, source: Tensor | None = None
    ) -> None:
        me, size = self._group.rank, self._group.size
        slices = _cut(bucket, splits, size)
        if slices[me].data_ptr() != own.data_ptr():
            slices[me].copy_(own)
        raw = [piece.view(torch.uint8) for piece in slices]  # bytes travel: every dtype works on every backend
        self._exchange([raw[me]] * size, raw)

    def signal(self, flag: bool) -> list[bool]:
        """Every rank's flag, in rank order; returns once all ranks have come here."""
        me, size = self._group.rank, self._group.size
        flags = torch.zeros(size, dtype=torch.uint8)
        flags[me] = flag
        each = [flags[rank : rank + 1] for rank in range(size)]
        self._exchange([each[me]] * size, each)
        return [bool(one) for one in flags.tolist()]

    def _exchange(self, send: list[Tensor], receive: list[Tensor]) -> None:
        """In place of a slice without elements one is sent that nobody reads.

        Every message counts in torch's numbering of collectives, which has to be the same on all ranks where
        TORCH_DISTRIBUTED_DEBUG=DETAIL compares it.
        """
        me, size, handle = self._group.rank, self._group.size, self._group.handle
        peers = [(me + shift) % size for shift in range(1, size)]
        send = [piece if piece.numel() else self._scratch.take(size, 1, piece) for piece in send]
        receive = [piece if piece.numel() else self._scratch.take(size + 1, 1, piece) for piece in receive]
        works = [dist.irecv(receive[peer], group=handle, group_src=peer) for peer in peers]
        works += [dist.isend(send[peer], group=handle, group_dst=peer) for peer in peers]
        deadline = time.monotonic() + self._clock.timeout_s
        for work in works:
            assert work is not None  # this rank is a member of the group
            # Without a time of its own a wait takes the one with which gloo was opened, whatever was set later.
            work.wait(timedelta(seconds=max(_SHORTEST_WAIT_S, deadline - time.monotonic())))


class SharedSeam:
    """The exchange for ranks that share a host: slices in shared memory are read in place, all others are sent.

    Signals, a byte from every rank to every other, say that all have written and that all have read. They go over
    gloo, so that a rank that does not come is noticed there as in any other exchange. In a meeting there are two for
    all buckets together.
    """

    name = "exchange"

    def __init__(self, group: Group, wire: ExchangeSeam, memory: SharedMemory) -> None:
        self._group = group
        self._wire = wire
        self._memory = memory
        self._zeros = torch.zeros(_CHUNK_NUMEL)
        self._meeting = False
        self._counting: list[bool] | None = None

    def begin(self) -> None:
        """Begin a meeting: what all ranks will read until its end is written when the first of them is read."""
        self._meeting, self._counting = True, None

    def end(self) -> bool:
        """End it; whether any bucket was read in place, so that `finish` should follow."""
        read = self._counting is not None
        self._meeting, self._counting = False, None
        return read

    def finish(self) -> None:
        """Return once all ranks have read what they had to: from then on this rank may write there again."""
        self._wire.signal(True)

    def reduce(self, bucket: Tensor, out: Tensor, splits: Sequence[int] | None = None, *, contributes: bool) -> None:
        me, size = self._group.rank, self._group.size
        place = self._memory.find(bucket)
        if place is None:
            self._wire.reduce(bucket, out, splits, contributes=contributes)
            return
        counting = self._meet(contributes)
        begin = sum(piece.numel() for piece in _cut(bucket, splits, size)[:me])
        for low in range(0, out.numel(), _CHUNK_NUMEL):
            part = out[low : low + _CHUNK_NUMEL]
            # Zeros are added as they would be sent: -0.0 + 0.0 is 0.0.
            first, second, *rest = (
                place.of(rank, begin + low, part.numel()) if counts else self._zeros[: part.numel()]
                for rank, counts in enumerate(counting)
            )
            torch.add(first, second, out=part)
            for contribution in rest:
                part.add_(contribution)
        for rank in range(size):
            place.let_go(rank, begin, out.numel())
        self._part()

    def gather(
        self, bucket: Slices, own: Tensor, splits: Sequence[int] | None = None, source: Tensor | None = None
    ) -> None:
        me, size = self._group.rank, self._group.size
        slices = _cut(bucket, splits, size)
        whole = bucket if source is None else source
        place = self._memory.find(whole) if isinstance(whole, Tensor) else None
        if place is None:
            self._wire.gather(slices, own)
            return
        begins = [0, *accumulate(piece.numel() for piece in slices)]
        for target in (place.of(me, begins[me], own.numel()), slices[me]):
            if target.data_ptr() != own.data_ptr():
                target.copy_(own)
        self._meet(True)
        for rank, piece in enumerate(slices):
            if rank != me and piece.numel():
                piece.copy_(place.of(rank, begins[rank], piece.numel()))
                place.let_go(rank, begins[rank], piece.numel())
        self._part()

    def _meet(self, contributes: bool) -> list[bool]:
        """Which ranks contribute, once all of them have written."""
        if self._counting is None:
            self._counting = self._wire.signal(contributes)
        return self._counting

    def _part(self) -> None:
        if not self._meeting:
            self._counting = None
            self.finish()


class NativeSeam:
    """The backend's own collectives (NCCL): reduce-scatter and all-gather, or one per owner where slices differ."""

    name = "native"

    def __init__(self, world_size: int, group: Group | None = None) -> None:
        """Without a group, over torch's default one."""
        self.world_size = world_size
        self._group = group
        self._scratch = _Scratch()
        # torch 2.13 renamed the flat collectives; both names are in the supported range.
        self._reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    @property
    def _handle(self) -> dist.ProcessGroup | None:
        return self._group.handle if self._group is not None else None

    def reduce(self, bucket: Tensor, out: Tensor, splits: Sequence[int] | None = None, *, contributes: bool) -> None:
        if splits is None or len(set(splits)) == 1:
            self._reduce_scatter(out, bucket if contributes else torch.zeros_like(bucket), group=self._handle)
            return
        me = dist.get_rank(self._handle)
        for owner, piece in enumerate(_cut(bucket, splits, self.world_size)):
            if piece.numel() == 0:
                continue
            # A reduction to one rank works in place, and what it leaves on the others is not said.
            part = out if owner == me else self._scratch.take(0, piece.numel(), piece)
            if contributes:
                part.copy_(piece)
            else:
                part.zero_()
            dist.reduce(part, group=self._handle, group_dst=owner)

    def gather(
        self, bucket: Slices, own: Tensor, splits: Sequence[int] | None = None, source: Tensor | None = None
    ) -> None:
        if isinstance(bucket, Tensor) and (splits is None or len(set(splits)) == 1):
            self._all_gather(bucket.view(torch.uint8), own.view(torch.uint8), group=self._handle)
            return
        slices = _cut(bucket, splits, self.world_size)
        slices[dist.get_rank(self._handle)].copy_(own)
        for owner, piece in enumerate(slices):
            if piece.numel():
                dist.broadcast(piece.view(torch.uint8), group=self._handle, group_src=owner)
