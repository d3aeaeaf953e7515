"""Short integers that stand for what a rank is doing, so that ranks can compare calls without sending texts.

[Note: comparing by sums] Ranks compare an item by adding its hashes over all ranks (an int64 all-reduce, wrapping):
they are equal when the sum is `world_size x mine`. Two independent 63-bit hashes keep an accident out of reach. With
5, 7 and 9 the middle rank would see equality, so a second round adds up "I saw a difference": every rank decides alike.
The size of the message grows with neither parameters nor ranks.
"""

from __future__ import annotations

import hashlib

_MASK = (1 << 64) - 1


def hashes(text: str) -> tuple[int, int]:
    """Two independent 63-bit hashes of `text`."""
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little") >> 1, int.from_bytes(digest[8:], "little") >> 1


def all_equal(total: int, mine: int, world_size: int) -> bool:
    """Whether a wrapped int64 sum over all ranks is what it would be if every rank held `mine`."""
    return (total - world_size * mine) & _MASK == 0
