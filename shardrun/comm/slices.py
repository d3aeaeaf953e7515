"""The one seam through which gradients are reduced and parameters gathered: `native` collectives, or slice `exchange`.

A bucket is a flat tensor of one slice per rank, all equal unless `splits` says otherwise. Both seams sum in FP32;
`exchange` sums in rank order, so its bits depend neither on how elements fall into buckets nor on the backend's
algorithm, and on gloo it is 3 to 4 times faster than reduce-scatter and all-gather; where the ranks of a group share a
host, slices are read in place, which gives the same bits and sends none of them. The seam's name is part of a record's
numerics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardrun.comm.group import Group
from shardrun.comm.shared_memory import Place, SharedMemory
from shardrun.errors import UsageError

_SHORTEST_WAIT_S = 0.001  # gloo takes 0 for no limit
_CHUNK_NUMEL = 1 << 17  # what is summed at once: the sum stays in a core's cache until the last rank's part is added


Finish = Callable[[], None]
"""Waits for what was begun and does what is left of it; called once, before the next exchange begins."""


class SliceSeam(Protocol):
    """How slices travel. Every rank of the group calls with buckets and splits of the same sizes in the same order.

    What a call begins with is not to be written before its Finish has returned on this rank, and, where slices are
    read in place, on all others: that is so when that of the next call has returned here, or `all_read`.
    """

    name: str

    def reduce(self, bucket: Tensor, out: Tensor, splits: Sequence[int] | None = None, *, contributes: bool) -> Finish:
        """Sum `bucket` over ranks, this rank's slice to `out` (splits[rank],); `bucket` is not written."""

    def gather(
        self, bucket: Slices, own: Tensor, splits: Sequence[int] | None = None, source: Tensor | None = None
    ) -> Finish:
        """Write every rank's `own` (splits[rank],) into its slice of `bucket`.

        `source`: a bucket in shared memory in which `own` is put, or stands already, for the others to read; else
        that is `bucket`.
        """

    def all_read(self) -> None:
        """Return once all ranks have finished all that was begun."""


Part = Tensor | Sequence[Tensor]
"""A slice: in one tensor, or in pieces of PIECE_NUMEL elements and a rest."""
Slices = Tensor | Sequence[Part]
"""A bucket, or its slices one by one; this rank's is one tensor."""
PIECE_NUMEL = (1 << 18) - 1024
"""A little less than a megabyte of float32, a multiple of 256."""


def slice_sizes(bucket: Slices, own: Tensor, splits: Sequence[int] | None, group: Group) -> list[int]:
    """Elements of each rank's slice of `bucket`; raises UsageError where they or `own` do not fit it."""
    if not isinstance(bucket, Tensor):
        splits = [sum(piece.numel() for piece in pieces_of(part)) for part in bucket]
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


def pieces_of(part: Part) -> list[Tensor]:
    """The tensors of a slice, in order."""
    return [part] if isinstance(part, Tensor) else list(part)


def _parts(bucket: Slices, splits: Sequence[int] | None, me: int, world_size: int) -> tuple[Tensor, list[Part]]:
    """This rank's slice of `bucket`, and all of them."""
    parts: list[Part] = list(cut(bucket, splits, world_size) if isinstance(bucket, Tensor) else bucket)
    own = parts[me]
    assert isinstance(own, Tensor)
    return own, parts


def cut(bucket: Tensor, splits: Sequence[int] | None, world_size: int) -> list[Tensor]:
    """The slices of `bucket`, as views."""
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

    def reduce(self, bucket: Tensor, out: Tensor, splits: Sequence[int] | None = None, *, contributes: bool) -> Finish:
        me, size = self._group.rank, self._group.size
        slices = cut(bucket, splits, size)
        if not contributes:
            zeros = self._scratch.take(me, max(piece.numel() for piece in slices), bucket).zero_()
            slices = [zeros[: piece.numel()] for piece in slices]

        first = 0 if me else 1  # comes in where the sum goes: of the first two it may begin with either
        parts = [
            slices[me] if rank == me else out if rank == first else self._scratch.take(rank, out.numel(), out)
            for rank in range(size)
        ]
        works = self._begin([[piece] for piece in slices], [[part] for part in parts])

        def finish() -> None:
            self._wait(works)
            for rank, part in enumerate(parts):
                if rank != first:
                    out.add_(part)

        return finish

    def gather(
        self, bucket: Slices, own: Tensor, splits: Sequence[int] | None = None, source: Tensor | None = None
    ) -> Finish:
        me, size = self._group.rank, self._group.size
        place, parts = _parts(bucket, splits, me, size)
        if place.data_ptr() != own.data_ptr():
            place.copy_(own)
        in_pieces = not all(isinstance(part, Tensor) for part in parts)
        sent = list(place.split(PIECE_NUMEL)) if in_pieces else [place]  # type: ignore[no-untyped-call]
        # Bytes travel: every dtype works on every backend.
        raw = [[piece.view(torch.uint8) for piece in pieces_of(part)] for part in parts]
        return partial(self._wait, self._begin([[piece.view(torch.uint8) for piece in sent]] * size, raw))

    def all_read(self) -> None:
        """What was sent is read from nowhere else."""

    def signal(self, flag: bool) -> Callable[[], list[bool]]:
        """Tell all ranks; what is returned gives every rank's flag, in rank order, once all ranks have come here."""
        me, size = self._group.rank, self._group.size
        flags = torch.zeros(size, dtype=torch.uint8)
        flags[me] = flag
        each = [flags[rank : rank + 1] for rank in range(size)]
        works = self._begin([[each[me]]] * size, [[one] for one in each])

        def heard() -> list[bool]:
            self._wait(works)
            return [bool(one) for one in flags.tolist()]

        return heard

    def _begin(self, send: list[list[Tensor]], receive: list[list[Tensor]]) -> list[dist.Work]:
        """Send and receive the pieces of each rank. In place of a slice without elements one is sent that nobody reads.

        Every message counts in torch's numbering of collectives, which has to be the same on all ranks where
        TORCH_DISTRIBUTED_DEBUG=DETAIL compares it. Whoever holds a work keeps a connection open that a failure is to
        close, so they are the group's to drop.
        """
        me, size, handle = self._group.rank, self._group.size, self._group.handle
        peers = [(me + shift) % size for shift in range(1, size)]
        works: list[dist.Work] = []
        self._group.under_way.append(works)
        for peer in peers:
            for piece in receive[peer]:
                place = piece if piece.numel() else self._scratch.take(size + 1, 1, piece)
                _add(works, dist.irecv(place, group=handle, group_src=peer))
        for peer in peers:
            for piece in send[peer]:
                place = piece if piece.numel() else self._scratch.take(size, 1, piece)
                _add(works, dist.isend(place, group=handle, group_dst=peer))
        return works

    def _wait(self, works: list[dist.Work]) -> None:
        deadline = time.monotonic() + self._clock.timeout_s
        while works:
            # Without a time of its own a wait takes the one with which gloo was opened, whatever was set later.
            works[0].wait(timedelta(seconds=max(_SHORTEST_WAIT_S, deadline - time.monotonic())))
            works.pop(0)
        self._group.under_way[:] = [one for one in self._group.under_way if one is not works]


def _add(works: list[dist.Work], work: dist.Work | None) -> None:
    assert work is not None  # this rank is a member of the group
    works.append(work)


class SharedSeam:
    """The exchange for ranks that share a host: slices in shared memory are read in place, all others are sent.

    Signals, a byte from every rank to every other, say that a rank has written what the others are to read.
    """

    name = "exchange"

    def __init__(self, group: Group, clock: Patience, memory: SharedMemory) -> None:
        self._group = group
        self._clock = clock
        self._wire = ExchangeSeam(group, clock)
        self._memory = memory
        self._zeros = torch.zeros(_CHUNK_NUMEL)
        self._has_read = False

    def reduce(self, bucket: Tensor, out: Tensor, splits: Sequence[int] | None = None, *, contributes: bool) -> Finish:
        me, size = self._group.rank, self._group.size
        place = self._memory.find(bucket)
        if place is None:
            return self._wire.reduce(bucket, out, splits, contributes=contributes)
        begin = sum(piece.numel() for piece in cut(bucket, splits, size)[:me])
        written = self._signal(contributes)

        def finish() -> None:
            self._add_up(place, begin, out, written())
            for rank in range(size):
                place.let_go(rank, begin, out.numel())
            self._has_read = True

        return finish

    def _add_up(self, place: Place, begin: int, out: Tensor, counting: Sequence[bool]) -> None:
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

    def gather(
        self, bucket: Slices, own: Tensor, splits: Sequence[int] | None = None, source: Tensor | None = None
    ) -> Finish:
        me, size = self._group.rank, self._group.size
        mine, parts = _parts(bucket, splits, me, size)
        whole = bucket if source is None else source
        place = self._memory.find(whole) if isinstance(whole, Tensor) else None
        if place is None:
            return self._wire.gather(parts, own)
        begins = [0, *accumulate(sum(piece.numel() for piece in pieces_of(part)) for part in parts)]
        for target in (place.of(me, begins[me], own.numel()), mine):
            if target.data_ptr() != own.data_ptr():
                target.copy_(own)
        written = self._signal(True)

        def finish() -> None:
            written()
            for rank, part in enumerate(parts):
                if rank != me:
                    _fill(part, place, rank, begins[rank])
                    place.let_go(rank, begins[rank], begins[rank + 1] - begins[rank])
            self._has_read = True

        return finish

    def all_read(self) -> None:
        if self._has_read:
            self._signal(True)()
            self._has_read = False

    def _signal(self, flag: bool) -> Callable[[], list[bool]]:
        """Tell all ranks; what is returned gives every rank's flag, in rank order, once all ranks have come here."""
        board = self._group.board
        if board is None:
            return self._wire.signal(flag)
        number = board.signal(flag)
        return lambda: board.hear(number, self._clock.timeout_s)


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

    def reduce(self, bucket: Tensor, out: Tensor, splits: Sequence[int] | None = None, *, contributes: bool) -> Finish:
        if splits is None or len(set(splits)) == 1:
            self._reduce_scatter(out, bucket if contributes else torch.zeros_like(bucket), group=self._handle)
            return _nothing
        me = dist.get_rank(self._handle)
        for owner, piece in enumerate(cut(bucket, splits, self.world_size)):
            if piece.numel() == 0:
                continue
            # A reduction to one rank works in place, and what it leaves on the others is not said.
            part = out if owner == me else self._scratch.take(0, piece.numel(), piece)
            if contributes:
                part.copy_(piece)
            else:
                part.zero_()
            dist.reduce(part, group=self._handle, group_dst=owner)
        return _nothing

    def gather(
        self, bucket: Slices, own: Tensor, splits: Sequence[int] | None = None, source: Tensor | None = None
    ) -> Finish:
        if isinstance(bucket, Tensor) and (splits is None or len(set(splits)) == 1):
            self._all_gather(bucket.view(torch.uint8), own.view(torch.uint8), group=self._handle)
            return _nothing
        place, parts = _parts(bucket, splits, dist.get_rank(self._handle), self.world_size)
        place.copy_(own)
        for owner, part in enumerate(parts):
            for piece in pieces_of(part):
                if piece.numel():
                    dist.broadcast(piece.view(torch.uint8), group=self._handle, group_src=owner)
        return _nothing

    def all_read(self) -> None:
        """What was sent is read from nowhere else."""


def _fill(part: Part, place: Place, rank: int, begin: int) -> None:
    """Copy what `rank` has from element `begin` of the place on."""
    for piece in pieces_of(part):
        if piece.numel():
            piece.copy_(place.of(rank, begin, piece.numel()))
        begin += piece.numel()


def _nothing() -> None:
    """The device waits by itself."""
