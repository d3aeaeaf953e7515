"""Short integers that stand for what a rank is doing, so that ranks can compare calls without sending texts.

[Note: comparing by sums] A hash h of an item travels as h and h * h in an int64 all-reduce SUM. By Cauchy and Schwarz
N * sum(h * h) equals sum(h) ** 2 exactly when all N ranks hold the same h, and every rank sees the same two sums: one
round decides, and all ranks decide alike. Three hashes of 24 bits keep an accident out of reach (2 ** -72) and the sums
inside int64 for up to 2 ** 15 ranks. The size of the message grows with neither parameters nor ranks.

[Note: balanced groups] Groups that each must be of one mind, but may differ from each other, share one all-reduce over
all ranks: in every group member m > 0 takes c_m * h off and rank 0 adds (c_1 + c_2 + ...) * h. Equal hashes leave 0. As
every c_m is positive, a text that only part of a group holds leaves a multiple of its hash that is not 0, and hashes of
other groups (another salt, another hash) do not cancel it but by accident. All ranks see the same sums, so all know
that some group differs; which one, texts must tell.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

HASHES = 3
MAX_RANKS = 1 << 15
INTEGERS = 2 * HASHES
"""How many int64 stand for one item."""

MAX_BALANCED = 8
"""How many texts a rank may have in one sum of balanced groups."""
_BITS = 22  # two factors of 22 bits, added up over 2 ** 15 ranks and 8 texts: below 2 ** 62


def integers(text: str) -> list[int]:
    """The int64 that a rank adds for `text`: three 24-bit hashes, each followed by its square."""
    digest = hashlib.blake2b(text.encode(), digest_size=3 * HASHES).digest()
    parts = [int.from_bytes(digest[3 * k : 3 * k + 3], "little") for k in range(HASHES)]
    return [number for part in parts for number in (part, part * part)]


def all_equal(sums: Sequence[int], world_size: int) -> bool:
    """Whether every rank added the integers of the same text."""
    pairs = zip(sums[::2], sums[1::2], strict=True)
    return all(world_size * squares == total * total for total, squares in pairs)


def balance(text: str, rank: int, size: int, salt: str) -> list[int]:
    """The 3 int64 that member `rank` of a group of `size` adds for `text`, see [Note: balanced groups].

    Summed over the group they are 0, 0, 0 if every member has the same text, and not 0, 0, 0 otherwise (an accident
    has a chance below 2 ** -60). Every member passes the same `salt`, and groups whose integers meet in one sum must
    have different ones: the name and the members of the group. At most 8 texts of a rank may meet in one sum.
    """
    hashes = _numbers(f"text {salt!r} {text}")
    factors = _sum_of_factors(salt, size) if rank == 0 else [-factor for factor in _factors(salt, rank)]
    return [factor * hashed for factor, hashed in zip(factors, hashes, strict=True)]


def _numbers(text: str) -> list[int]:
    """Three hashes of 22 bits."""
    digest = hashlib.blake2b(text.encode(), digest_size=3 * HASHES).digest()
    return [int.from_bytes(digest[3 * k : 3 * k + 3], "little") >> (24 - _BITS) for k in range(HASHES)]


def _factors(salt: str, rank: int) -> list[int]:
    """Positive, so that no two members of one mind can cancel each other."""
    return [number + 1 for number in _numbers(f"factor {salt!r} {rank}")]


@lru_cache(maxsize=64)  # steps repeat the same few groups, and a group can have 2 ** 15 members
def _sum_of_factors(salt: str, size: int) -> list[int]:
    every = [_factors(salt, rank) for rank in range(1, size)]
    return [sum(column) for column in zip(*every, strict=True)] if every else [0] * HASHES
