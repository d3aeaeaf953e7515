"""The one seam through which gradients are reduced and parameters gathered: `native` collectives, or slice `exchange`.

A bucket is a flat tensor of `world_size` equal slices. Both seams sum in FP32; `exchange` sums in rank order, so its
bits depend neither on how elements fall into buckets nor on the backend's algorithm, and on gloo it is 3 to 4 times
faster than reduce-scatter and all-gather. The seam's name is part of a record's numerics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Wait = Callable[[list[dist.Work]], None]


class SliceSeam(Protocol):
    """How slices travel. Every rank of the group calls with buckets of the same size in the same order."""

    name: str

    def reduce(self, bucket: Tensor, out: Tensor, *, contributes: bool) -> None:
        """Sum `bucket` (world_size * n,) over ranks, this rank's slice to `out` (n,); `bucket` is not written."""

    def gather(self, bucket: Tensor, own: Tensor) -> None:
        """Write every rank's `own` (n,) into its slice of `bucket` (world_size * n,)."""


class ExchangeSeam:
    """isend/irecv of slices and a local sum in rank order (gloo)."""

    name = "exchange"

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._received: dict[tuple[int, torch.dtype], Tensor] = {}

    def reduce(self, bucket: Tensor, out: Tensor, *, contributes: bool) -> None:
        slices = bucket.view(self.world_size, -1)
        if not contributes:
            slices = torch.zeros_like(slices[0]).expand(self.world_size, -1)
        received = [slices[rank] if rank == self.rank else self._buffer(rank, out) for rank in range(self.world_size)]
        self._exchange([slices[rank] for rank in range(self.world_size)], received)
        out.copy_(received[0])
        for contribution in received[1:]:
            out.add_(contribution)

    def gather(self, bucket: Tensor, own: Tensor) -> None:
        slices = bucket.view(self.world_size, -1)
        slices[self.rank].copy_(own)
        raw = slices.view(torch.uint8)  # bytes travel: every dtype works on every backend
        self._exchange([raw[self.rank]] * self.world_size, [raw[rank] for rank in range(self.world_size)])

    def _exchange(self, send: list[Tensor], receive: list[Tensor]) -> None:
        peers = [(self.rank + shift) % self.world_size for shift in range(1, self.world_size)]
        works = [dist.irecv(receive[peer], peer) for peer in peers]
        works += [dist.isend(send[peer], peer) for peer in peers]
        for work in works:
            assert work is not None  # this rank is a member of the default group
            work.wait()

    def _buffer(self, rank: int, like: Tensor) -> Tensor:
        """A receive buffer (n,) per peer that is kept from step to step."""
        key = (rank, like.dtype)
        held = self._received.get(key)
        if held is None or held.numel() < like.numel():
            held = self._received[key] = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
        return held[: like.numel()]


class NativeSeam:
    """The backend's own reduce-scatter and all-gather (NCCL)."""

    name = "native"

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        # torch 2.13 renamed the flat collectives; both names are in the supported range.
        self._reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def reduce(self, bucket: Tensor, out: Tensor, *, contributes: bool) -> None:
        self._reduce_scatter(out, bucket if contributes else torch.zeros_like(bucket))

    def gather(self, bucket: Tensor, own: Tensor) -> None:
        self._all_gather(bucket.view(torch.uint8), own.view(torch.uint8))
