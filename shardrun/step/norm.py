"""The global gradient norm, independent of buckets and ranks to the last bit.

[Note: exact norm] Squares are added in float64 inside fixed blocks of 256 elements of the canonical space, in a fixed
order. The block sums of all ranks are then added by `math.fsum`, which rounds once, at the end: no order of ranks,
slices or buckets can change the result, and padding adds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from shardrun.shard.layout import ALIGN

_ROWS = {"cpu": 256, "cuda": 1 << 18}
"""Blocks at once: what stays in a core's own cache, or fills a GPU."""


def block_squares(grad: Tensor) -> Tensor:
    """Sum of squares of each block of 256: (n,) of any floating dtype -> (n / 256,) float64."""
    blocks = grad.view(-1, ALIGN)
    out = torch.empty(blocks.shape[0], dtype=torch.float64, device=grad.device)
    rows = _ROWS.get(grad.device.type, _ROWS["cuda"])
    for low in range(0, blocks.shape[0], rows):
        squares = blocks[low : low + rows].double()
        squares.mul_(squares)
        if grad.device.type == "cpu":  # each row is added by itself, whatever rows stand beside it
            torch.sum(squares, 1, out=out[low : low + rows])
        else:  # how a GPU splits a row depends on the number of rows, so the tree is spelt out
            while squares.shape[1] > 1:
                half = squares.shape[1] // 2
                squares = squares[:, :half] + squares[:, half:]
            out[low : low + rows] = squares[:, 0]
    return out


def norm_of(blocks: Iterable[float]) -> float:
    """The L2 norm from block sums of squares; NaN or infinity if any of them is."""
    values = list(blocks)
    if not all(map(math.isfinite, values)):
        return math.nan
    return math.sqrt(math.fsum(values))


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What torch's clip_grad_norm_ multiplies by: min(1, max_norm / (norm + 1e-6))."""
    return min(1.0, max_norm / (norm + 1e-6))
