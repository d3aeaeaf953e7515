"""FP32 masters of 16-bit parameters: part of the state, and behind the parameters if somebody else writes to these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardrun.shard.layout import Fragment
from shardrun.step.slices import Slice


class Masters:
    """The masters in this rank's slices; none where parameters are FP32 or masters were not asked for. Local."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        self._slices = [s for s in slices if s.has_master]
        self.views: dict[str, Tensor] = {
            f"{f.path}/master": s.leaf[f.offset : f.offset + f.stop - f.start]
            for s in self._slices
            for f in s.bucket.fragments
        }
        """ "<path>/master" -> the live FP32 elements (stop - start,) of this rank's fragment."""

    @property
    def nbytes(self) -> int:
        """Bytes of FP32 masters on this rank, padding included."""
        return sum(s.leaf.nbytes for s in self._slices)

    def overwritten(self) -> list[str]:
        """Parameters whose value is not that of their master, in this rank's slices: somebody wrote to one of them."""
        return [
            f"{fragment.path}: its value is not that of its FP32 master, which a step would start from; load model and "
            "record of one checkpoint, or call refresh_masters() on every rank after changing parameters"
            for s in self._slices
            if not torch.equal(_bits(s.leaf.to(s.bucket.own.dtype)), _bits(s.bucket.own))
            for fragment in s.bucket.fragments
            if _differ(s, fragment)
        ]

    def refresh(self) -> None:
        """Take over the parameters' present values."""
        for s in self._slices:
            s.leaf.copy_(s.bucket.own)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over saved masters, named as in `views`; the parameters' own values are loaded with the model."""
        for name, view in self.views.items():
            view.copy_(tensors[name])


def _differ(s: Slice, fragment: Fragment) -> bool:
    part = slice(fragment.offset, fragment.offset + fragment.stop - fragment.start)
    return not torch.equal(_bits(s.leaf[part].to(s.bucket.own.dtype)), _bits(s.bucket.own[part]))


def _bits(tensor: Tensor) -> Tensor:
    """16-bit elements as integers: NaN equals itself."""
    return tensor.view(torch.int16)
