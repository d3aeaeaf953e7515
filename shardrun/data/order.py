"""Which samples make up an update: pure functions of (seed, epoch, index), with no memory of what came before.

The position of a run is one integer, the number of samples consumed. From it follow the epoch, the window, and what
each micro-batch of the window holds, whatever the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardrun.data.seeding import Purpose, derive_seed
from shardrun.errors import UsageError

ROUNDS = 8
_MAX_SAMPLES = 2**62


@dataclass(frozen=True)
class Window:
    """The samples of one update: places [start, stop) in the order of `epoch`.

    `next_position` is the run's position once the window is consumed. `dropped` counts samples between the previous
    position and `next_position` that no window holds; it is 0 without `drop_last`.
    """

    epoch: int
    start: int
    stop: int
    next_position: int
    dropped: int = 0

    @property
    def samples(self) -> int:
        return self.stop - self.start


def next_window(position: int, n: int, global_batch: int, drop_last: bool = False) -> Window:
    """The window that comes at `position` (samples consumed so far) over a data set of `n` samples.

    A window never crosses the end of an epoch: the last one of an epoch is short, or with `drop_last` left out.
    """
    if n < 1 or global_batch < 1 or position < 0:
        raise UsageError(f"no window at position {position} of {n} samples with a global batch of {global_batch}")
    if drop_last and n < global_batch:
        raise UsageError(
            f"data.drop_last drops all: {n} samples are fewer than train.global_batch_size {global_batch}; "
            "set data.drop_last to false or the batch smaller"
        )
    epoch, start = divmod(position, n)
    skipped = 0
    if drop_last and n - start < global_batch:  # only after a change of settings: the windows before skip this tail
        skipped, epoch, start = n - start, epoch + 1, 0
    stop = min(start + global_batch, n)
    tail = n - stop if drop_last and n - stop < global_batch else 0
    return Window(epoch, start, stop, epoch * n + stop + tail, skipped + tail)


def windows_per_epoch(n: int, global_batch: int, drop_last: bool = False) -> int:
    """How many updates one epoch of `n` samples takes, from its first sample."""
    return n // global_batch if drop_last else -(-n // global_batch)


def micro_batches(window: Window, micro_batch_size: int) -> list[range]:
    """Places in the epoch's order that each micro-batch 0 .. V-1 of the window holds; only the last may be short.

    The numbers run over the whole world: what a micro-batch holds depends neither on the rank nor on the world size.
    """
    if micro_batch_size < 1:
        raise UsageError(f"micro_batch_size {micro_batch_size} must be at least 1")
    starts = range(window.start, window.stop, micro_batch_size)
    return [range(start, min(start + micro_batch_size, window.stop)) for start in starts]


def rank_share(total: int, rank: int, world: int) -> range:
    """The micro-batches of a window of `total` that `rank` computes: contiguous, sizes differ by one at most.

    [Note: nested shares] The cuts are ceil(total * rank / world). For a world twice as large every share is cut in
    two, so the shares of 1, 2, 4, 8 ranks are the levels of one binary tree over the micro-batches, even when `total`
    is odd. A sum that follows this tree does not depend on the number of ranks.
    """
    if not 0 <= rank < world or total < 0:
        raise UsageError(f"no share: rank {rank} of world size {world}, {total} micro-batches")
    return range(-(-total * rank // world), -(-total * (rank + 1) // world))


def sample_indices(seed: int, epoch: int, n: int, start: int, stop: int, shuffle: bool = True) -> NDArray[np.int64]:
    """Indices into the data set at places [start, stop) of the epoch's order, shape (stop - start,), int64.

    Over 0 .. n-1 they are a permutation of 0 .. n-1, computed place by place without storing it: a Feistel network
    over the next power of four, its outputs beyond n sent through again until they fall inside (cycle walking; Black
    and Rogaway 2002). Only integer operations, so the order is the same on every machine and for ever.
    """
    if not 0 <= start <= stop <= n or n > _MAX_SAMPLES:
        raise UsageError(f"places {start} to {stop} are outside an epoch of {n} samples (at most 2**62)")
    places = np.arange(start, stop, dtype=np.uint64)
    if shuffle and n > 1:
        half_bits = -(-(n - 1).bit_length() // 2)
        keys = [derive_seed(Purpose.ORDER, seed, epoch, number) for number in range(ROUNDS)]
        places = _feistel(places, half_bits, keys)
        outside = np.flatnonzero(places >= n)
        while outside.size:
            walked = _feistel(places[outside], half_bits, keys)
            places[outside] = walked
            outside = outside[walked >= n]
    return places.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half_bits: int, keys: list[int]) -> NDArray[np.uint64]:
    """A bijection of [0, 4**half_bits), elementwise."""
    mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ np.uint64(key)) & mask)
    return (left << shift) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014): every input bit reaches every output bit."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
