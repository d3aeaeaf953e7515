"""Short integers that stand for what a rank is doing, so that ranks can compare calls without sending texts.

[Note: comparing by sums] A hash h of an item travels as h and h * h in an int64 all-reduce SUM. By Cauchy and Schwarz
N * sum(h * h) equals sum(h) ** 2 exactly when all N ranks hold the same h, and every rank sees the same two sums: one
round decides, and all ranks decide alike. Three hashes of 24 bits keep an accident out of reach (2 ** -72) and the sums
inside int64 for up to 2 ** 15 ranks. The size of the message grows with neither parameters nor ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

HASHES = 3
MAX_RANKS = 1 << 15
INTEGERS = 2 * HASHES
"""How many int64 stand for one item."""


def integers(text: str) -> list[int]:
    """The int64 that a rank adds for `text`: three 24-bit hashes, each followed by its square."""
    digest = hashlib.blake2b(text.encode(), digest_size=3 * HASHES).digest()
    parts = [int.from_bytes(digest[3 * k : 3 * k + 3], "little") for k in range(HASHES)]
    return [number for part in parts for number in (part, part * part)]


def all_equal(sums: Sequence[int], world_size: int) -> bool:
    """Whether every rank added the integers of the same text."""
    pairs = zip(sums[::2], sums[1::2], strict=True)
    return all(world_size * squares == total * total for total, squares in pairs)
