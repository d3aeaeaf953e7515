"""FP32 masters of 16-bit parameters: part of the state, and behind the parameters if somebody else writes to these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardrun.shard.flat_buffer import FlatBuffers
from shardrun.step.slices import Slice


class Masters:
    """The masters in this rank's slices; none where parameters are FP32 or masters were not asked for. Local."""

    def __init__(self, slices: Sequence[Slice], flat: FlatBuffers) -> None:
        self._slices = [s for s in slices if s.has_master]
        self._flat = flat
        self.views: dict[str, Tensor] = {
            f"{f.path}/master": s.leaf[f.offset : f.offset + f.stop - f.start]
            for s in self._slices
            for f in s.bucket.fragments
        }
        """ "<path>/master" -> the live FP32 elements (stop - start,) of this rank's fragment."""
        self._note_versions()

    @property
    def nbytes(self) -> int:
        """Bytes of FP32 masters on this rank, padding included."""
        return sum(s.leaf.nbytes for s in self._slices)

    def overwritten(self) -> list[str]:
        """Parameters that somebody wrote to since the last step: their masters hold what was there before."""
        return [
            f"{path}: was written to since the last step, and its FP32 master holds the value from before; "
            "call refresh_masters() on every rank after changing parameters"
            for path, parameter, version in self._versions
            if parameter._version != version
        ]

    def refresh(self) -> None:
        """Take over the parameters' present values."""
        for s in self._slices:
            s.leaf.copy_(s.bucket.own)
        self._note_versions()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over saved masters, named as in `views`; the parameters' own values are loaded with the model."""
        for name, view in self.views.items():
            view.copy_(tensors[name])
        self._note_versions()

    def _note_versions(self) -> None:
        # A commit writes through the flat storage, which leaves the parameters' own version counters alone.
        mastered = [(p, q) for p, q in self._flat.parameters() if self._slices and q.dtype != torch.float32]
        self._versions = [(path, parameter, parameter._version) for path, parameter in mastered]
