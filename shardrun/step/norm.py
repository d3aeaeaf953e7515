"""The global gradient norm, independent of buckets and ranks to the last bit.

[Note: exact norm] Squares are added in float64 inside fixed blocks of 256 elements of the canonical space, in a fixed
order. The block sums of all slices, sessions and ranks are then added without any rounding, as integers in units of
2 ** -362 that travel as 32-bit digits in one int64 all-reduce: no order of ranks, slices or buckets can change the
result, padding adds nothing, and the message has one size whatever the model's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shardrun.shard.layout import ALIGN

LIMBS = 22
_POINT = 298 + 64
"""Bits after the binary point; the room below 2 ** -298 takes a mantissa's trailing zeros."""
_HALF = (1 << 27) - 1
_DIGIT = (1 << 32) - 1
_ROWS = {"cpu": 1024, "cuda": 1 << 18}
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


def squares_of(grads: Iterable[Tensor]) -> tuple[int, int]:
    """(exact sum of all squares in units of 2 ** -362, number of blocks of 256 that hold a NaN or an infinity).

    Each tensor is (n,) of any floating dtype, n a multiple of 256, all on one device, which is waited for once. Blocks
    that are not finite add nothing.
    """
    of_each = [block_squares(grad) for grad in grads]
    if not of_each:
        return 0, 0
    blocks = torch.cat(of_each)
    fine = torch.isfinite(blocks)
    *total, bad = torch.cat([exact_sum(torch.where(fine, blocks, 0.0)), (~fine).sum()[None]]).tolist()
    return from_limbs(total), bad


def count_non_finite(grads: Sequence[Tensor]) -> int:
    """How many of `grads`, (n,) of any floating dtype on one device, hold a NaN or an infinity."""
    if not grads:
        return 0
    # A sum reads once and writes nothing; it is finite only if all elements are.
    sums = torch.stack([grad.sum(dtype=torch.float32) for grad in grads])
    doubtful = [grad for grad, fine in zip(grads, torch.isfinite(sums).tolist(), strict=True) if not fine]
    return sum(not bool(torch.isfinite(grad).all()) for grad in doubtful)


def exact_sum(values: Tensor) -> Tensor:
    """The exact sum of (n,) finite float64 block sums, in units of 2 ** -362, as (LIMBS + 3,) int64 digits.

    Every finite float32 squared is a multiple of 2 ** -298, and so is every sum of such squares.
    """
    fraction, exponent = torch.frexp(values)
    mantissa = fraction.mul(2.0**53).long()
    place = exponent.long() + (_POINT - 53)
    digits = torch.zeros(LIMBS + 3, dtype=torch.int64, device=values.device)
    for part, at in ((mantissa & _HALF, place), (mantissa >> 27, place + 27)):  # 27 bits and 31 more stay below 2 ** 63
        shifted = part << (at & 31)
        digits.index_add_(0, at >> 5, shifted & _DIGIT)
        digits.index_add_(0, (at >> 5) + 1, shifted >> 32)
    return digits


def to_limbs(total: int) -> list[int]:
    """A sum as LIMBS digits of 32 bits; digits of all ranks can be added up in int64."""
    return [(total >> (32 * k)) & _DIGIT for k in range(LIMBS)]


def from_limbs(limbs: Iterable[int]) -> int:
    """The sum that digits stand for, carried or not."""
    return sum(limb << (32 * k) for k, limb in enumerate(limbs))


def norm_of(total: int) -> float:
    """The L2 norm from the exact sum of squares; the division rounds once, and so does the root."""
    return math.sqrt(total / (1 << _POINT))


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What torch's clip_grad_norm_ multiplies by: min(1, max_norm / (norm + 1e-6))."""
    return min(1.0, max_norm / (norm + 1e-6))
