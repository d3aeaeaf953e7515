"""Slices cut into leaves for torch.optim, and packed into passes of a chunk of scratch each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardrun.optim.state import StateSpec
from shardrun.shard.layout import Fragment, align

CHUNK_NUMEL = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Elements that are proposed at once: what the cache holds on a CPU, enough to fill a GPU."""


@dataclass(frozen=True)
class SliceTensors:
    """What the optimizer needs of one bucket: this rank's slice (n,) of everything, and what stands in it."""

    option_group: int
    leaf: Tensor
    """(n,) what is stepped: the FP32 master, or the live parameter slice itself."""
    grad: Tensor
    """(n,) the reduced gradient in the leaf's dtype."""
    proposed: Tensor | None
    """(n,) in the parameter's dtype: where `stage` writes; None in a world of one, which stages nothing."""
    fragments: tuple[Fragment, ...]


@dataclass
class Kept:
    """What an update left, for the commit to take over without running it again."""

    leaf: Tensor
    state: dict[str, Any] = field(default_factory=dict)


@dataclass
class Piece:
    """At most a chunk of one fragment; a leaf of its own for torch.optim."""

    path: str
    leaf: Tensor
    grad: Tensor
    proposed: Tensor | None
    spec: StateSpec
    elements: dict[str, Tensor]
    """Flat views for state of the leaf's size; before a first update made any, that memory is dead."""
    kept: Kept | None = None


@dataclass
class Pass:
    """Pieces that are proposed together, with scratch leaves of the same sizes, and the copies that load them."""

    group: int
    pieces: list[Piece]
    leaves: list[Tensor]
    states: list[dict[str, Tensor]]
    optimizer: torch.optim.Optimizer
    source: list[Tensor]
    target: list[Tensor]

    def run(self, takes_part: Sequence[bool]) -> None:
        """Step the scratch leaves that take part, on their pieces' gradients."""
        for piece, leaf, taken in zip(self.pieces, self.leaves, takes_part, strict=True):
            leaf.grad = piece.grad if taken else None
        if any(takes_part):
            self.optimizer.step()


class Scratch:
    """Memory of one chunk per state key and dtype, which all passes share."""

    def __init__(self, chunk_numel: int) -> None:
        self._chunk_numel = chunk_numel
        self._chunks: dict[tuple[str, torch.dtype], Tensor] = {}

    def room(self, key: str, offset: int, like: Tensor) -> Tensor:
        """The elements (like.numel(),) at `offset` of the chunk of `key`."""
        chunk = self._chunks.get((key, like.dtype))
        if chunk is None:
            chunk = torch.empty(self._chunk_numel, dtype=like.dtype, device=like.device)
            self._chunks[key, like.dtype] = chunk
        return chunk[offset : offset + like.numel()]


def cut(tensors: SliceTensors, spec: StateSpec, flat: Mapping[str, Tensor], chunk_numel: int) -> Iterator[Piece]:
    """The fragments of a slice in pieces of at most `chunk_numel`; `flat` (n,) is memory for the state by key."""
    for fragment in tensors.fragments:
        end = fragment.offset + fragment.stop - fragment.start
        for low in range(fragment.offset, end, chunk_numel):
            part = slice(low, min(low + chunk_numel, end))
            yield Piece(
                fragment.path,
                tensors.leaf[part],
                tensors.grad[part],
                None if tensors.proposed is None else tensors.proposed[part],
                spec,
                {key: tensor[part] for key, tensor in flat.items()},
            )


def packed(pieces: Iterable[Piece], chunk_numel: int) -> Iterator[list[Piece]]:
    """The pieces in their order, in batches of at most `chunk_numel` elements."""
    batch: list[Piece] = []
    filled = 0
    for piece in pieces:
        numel = align(piece.leaf.numel())
        if batch and filled + numel > chunk_numel:
            yield batch
            batch, filled = [], 0
        batch.append(piece)
        filled += numel
    if batch:
        yield batch
