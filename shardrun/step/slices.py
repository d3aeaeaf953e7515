"""This rank's slices of a sharded session: allocated once, and what happens to each in a step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

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

    @property
    def has_master(self) -> bool:
        """Whether the leaf is an FP32 master beside a 16-bit parameter."""
        return self.leaf is not self.bucket.own

    @property
    def nbytes(self) -> int:
        """Bytes of the reduced gradient, and of its cast to the leaf's dtype where that is another one."""
        return self.reduced.nbytes + (0 if self.grad is self.reduced else self.grad.nbytes)

    def normalise(self, divisor: int | None) -> None:
        """Divide once by the exact weight, in FP32; then cast once to the optimizer's gradient dtype."""
        if divisor is not None:
            self.reduced.div_(divisor)
        if self.grad is not self.reduced:
            self.grad.copy_(self.reduced)

    def clear_padding(self) -> None:
        """Before the new slice is staged: where 16-bit elements lie on FP32 gradients, padding is not zero yet."""
        if self.proposed is not None and self.proposed.dtype != torch.float32:
            self.proposed.zero_()

    def commit(self) -> None:
        """Switch this bucket's parameters over, after the optimizer's own commit; allocates nothing."""
        if self.has_master:
            self.bucket.own.copy_(self.leaf)
        if self.proposed is None:
            return
        for rank, (low, high) in enumerate(pairwise(accumulate(self.bucket.splits, initial=0))):
            if rank != self.bucket.rank:
                self.bucket.param[low:high].copy_(self.bucket.staging[low:high])


def make_slice(bucket: FlatBucket, masters: bool, proposes: bool) -> Slice:
    """Allocate what a step of `bucket` needs on this rank."""
    own = bucket.own
    reduced = torch.zeros(own.numel(), dtype=torch.float32, device=own.device)
    leaf = own.float() if masters and own.dtype != torch.float32 else own
    grad = reduced if leaf.dtype == torch.float32 else torch.zeros_like(own)
    return Slice(bucket, reduced, grad, leaf, bucket.own_staging if proposes else None)
