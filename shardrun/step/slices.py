"""This rank's slices of a sharded session: allocated once, and what happens to each in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardrun.comm.slices import PIECE_NUMEL, Part, cut
from shardrun.shard.flat_buffer import FlatBucket


@dataclass(frozen=True)
class Slice:
    """One bucket's buffers on this rank; n = bucket.own.numel()."""

    bucket: FlatBucket
    reduced: Tensor
    """(n,) float32: the sum over ranks, then the mean, then clipped."""
    grad: Tensor
    """(n,) in the leaf's dtype, what the optimizer sees; `reduced` itself where that is float32."""
    leaf: Tensor
    """(n,) what is stepped: the FP32 master, or the live parameter slice itself."""
    proposed: Tensor | None
    """(n,) in the parameter's dtype: the new slice, this rank's part of the staging, so on the memory of the pending
    gradients. None in a world of one, where the leaf is stepped in the commit."""

    live: Sequence[Tensor]
    """By rank: (splits[rank],) the live parameter slices."""
    streams: bool
    """Whether gradients are streamed, so that `bucket.grad` is a slot which the next bucket needs."""
    arriving: list[Part] = field(default_factory=list)
    """Between gather and commit, by rank: (splits[rank],) new slices in the parameter's dtype."""

    @property
    def has_master(self) -> bool:
        """Whether the leaf is an FP32 master beside a 16-bit parameter."""
        return self.leaf is not self.bucket.own

    @property
    def nbytes(self) -> int:
        """Bytes of the reduced gradient, and of its cast to the leaf's dtype where that is another one."""
        apart = 0 if self.reduced is self.bucket.grad else self.reduced.nbytes
        return apart + (0 if self.grad is self.reduced else self.grad.nbytes)

    def normalise(self, divisor: int | None) -> None:
        """Divide once by the exact weight, in FP32; then cast once to the optimizer's gradient dtype."""
        if divisor is not None:
            self.reduced.div_(divisor)
        if self.grad is not self.reduced:
            self.grad.copy_(self.reduced)

    def clear_gaps(self) -> None:
        """Zeros where no parameter is, in the memory in which the new slice is staged."""
        for gap in self.bucket.own_gaps:
            gap.zero_()

    def await_others(self) -> None:
        """Have memory for the new slices of the other ranks; they are on that of the gradients if these are kept."""
        assert self.proposed is not None
        places = cut(self.bucket.staging, self.bucket.splits, len(self.bucket.splits))
        self.arriving[:] = [
            _pieces_like(place) if self.streams and rank != self.bucket.rank else place
            for rank, place in enumerate(places)
        ]

    def commit(self) -> None:
        """Switch this bucket's parameters over, after the optimizer's own commit; allocates no memory for values."""
        if self.has_master:
            self.bucket.own.copy_(self.leaf)
        if self.proposed is None:
            return
        for rank, (live, new) in enumerate(zip(self.live, self.arriving, strict=True)):
            if rank == self.bucket.rank:
                continue
            if isinstance(new, Tensor):
                live.copy_(new)
            else:
                torch._foreach_copy_(cut(live, [one.numel() for one in new], len(new)), list(new))
        self.forget()

    def forget(self) -> None:
        """Let go of what has arrived."""
        self.arriving.clear()


def _pieces_like(place: Tensor) -> Part:
    """Memory of the size of `place`, on a CPU in pieces that fit where backward's activations were: a block of many
    megabytes would be new memory in every step."""
    if place.device.type != "cpu":
        return torch.empty_like(place)
    numel, sizes = place.numel(), range(0, place.numel(), PIECE_NUMEL)
    return [place.new_empty(min(PIECE_NUMEL, numel - low)) for low in sizes]


def make_slices(buckets: Sequence[FlatBucket], masters: bool, proposes: bool, streams: bool) -> list[Slice]:
    """Allocate what a step of the buckets needs on this rank, at once for all of them: small memories get no huge
    pages. FP32 masters hold the parameters' values.
    """
    owns = [bucket.own for bucket in buckets]
    alone = streams and all(len(bucket.splits) == 1 for bucket in buckets)  # nothing is reduced, and nothing kept
    sums = [bucket.grad for bucket in buckets] if alone else _zeros([own.numel() for own in owns], owns)
    mastered = [masters and own.dtype != torch.float32 for own in owns]
    spaces = _zeros([own.numel() if taken else 0 for own, taken in zip(owns, mastered, strict=True)], owns)
    slices = []
    for bucket, reduced, space, taken in zip(buckets, sums, spaces, mastered, strict=True):
        leaf = space.copy_(bucket.own) if taken else bucket.own
        grad = reduced if leaf.dtype == torch.float32 else torch.zeros_like(bucket.own)
        live = cut(bucket.param, bucket.splits, len(bucket.splits))
        slices.append(Slice(bucket, reduced, grad, leaf, bucket.own_staging if proposes else None, live, streams))
    return slices


def _zeros(numels: Sequence[int], owns: Sequence[Tensor]) -> list[Tensor]:
    """(numel,) float32 zeros for each, in one memory on the device of `owns`."""
    if not owns:
        return []
    return list(owns[0].new_zeros(sum(numels), dtype=torch.float32).split(list(numels)))  # type: ignore[no-untyped-call]
