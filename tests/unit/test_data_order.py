"""Order: a permutation per epoch, windows, micro-batches and shares, all pure functions of integers."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardrun.data.order import (
    ROUNDS,
    Window,
    micro_batches,
    next_window,
    rank_share,
    sample_indices,
    windows_per_epoch,
)
from shardrun.data.seeding import Purpose, derive_seed
from shardrun.errors import UsageError

SIZES = st.integers(1, 400)
SEEDS = st.integers(0, 2**63 - 1)


def slow_index(seed: int, epoch: int, n: int, place: int) -> int:
    """The twin of `sample_indices` in Python's own integers, one place at a time."""
    word = 2**64 - 1
    half = -(-(n - 1).bit_length() // 2)
    keys = [derive_seed(Purpose.ORDER, seed, epoch, number) for number in range(ROUNDS)]

    def mixed(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) & word
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & word
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & word
        return value ^ (value >> 31)

    while True:
        left, right = place >> half, place & (2**half - 1)
        for key in keys:
            left, right = right, left ^ (mixed(right ^ key) & (2**half - 1))
        place = (left << half) | right
        if place < n:
            return place


def epoch_windows(n: int, global_batch: int, drop_last: bool = False) -> list[Window]:
    """The windows of the first epoch."""
    windows, position = [], 0
    while position < n:
        windows.append(next_window(position, n, global_batch, drop_last))
        position = windows[-1].next_position
    return windows


def test_the_order_never_changes() -> None:
    # Golden values. A change here reorders the data of every run that is resumed: it must never be made.
    assert sample_indices(0, 0, 10, 0, 10).tolist() == [4, 7, 1, 8, 0, 6, 2, 9, 5, 3]
    assert sample_indices(0, 1, 10, 0, 10).tolist() == [4, 9, 0, 7, 5, 1, 6, 8, 2, 3]
    assert sample_indices(1234567890123, 7, 2666, 2600, 2606).tolist() == [579, 2272, 2422, 1851, 324, 1862]
    assert sample_indices(5, 3, 10**15, 999, 1002).tolist() == [58569663839656, 748303129595665, 137928556042432]


@settings(deadline=None)
@given(SEEDS, st.integers(0, 10**9), SIZES)
def test_an_epoch_is_a_permutation(seed: int, epoch: int, n: int) -> None:
    assert sorted(sample_indices(seed, epoch, n, 0, n).tolist()) == list(range(n))


@settings(deadline=None)
@given(SEEDS, st.integers(0, 1000), st.integers(2, 10**12), st.data())
def test_any_part_is_the_slow_twin_place_by_place(seed: int, epoch: int, n: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start, min(n, start + 5)))
    expected = [slow_index(seed, epoch, n, place) for place in range(start, stop)]
    assert sample_indices(seed, epoch, n, start, stop).tolist() == expected


def test_seeds_and_epochs_give_other_orders_and_no_place_is_favoured() -> None:
    orders = {tuple(sample_indices(seed, epoch, 50, 0, 50)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400
    seen = Counter(
        (place, int(index)) for seed in range(700) for place, index in enumerate(sample_indices(seed, 0, 7, 0, 7))
    )
    assert len(seen) == 49
    assert all(60 <= count <= 140 for count in seen.values())  # 100 expected, standard deviation 9


@pytest.mark.parametrize("n", [2, 3, 4])
def test_small_epochs_reach_every_order(n: int) -> None:
    reached = {tuple(sample_indices(seed, 0, n, 0, n).tolist()) for seed in range(500)}
    assert reached == set(itertools.permutations(range(n)))


def test_without_shuffle_the_order_is_that_of_the_data() -> None:
    assert sample_indices(3, 9, 100, 10, 14, shuffle=False).tolist() == [10, 11, 12, 13]


def test_indices_are_int64_and_memory_is_that_of_the_part() -> None:
    part = sample_indices(0, 0, 2**61, 2**60, 2**60 + 3)
    assert part.dtype == np.int64
    assert part.shape == (3,)


@pytest.mark.parametrize("places", [(-1, 2), (3, 2), (0, 11)])
def test_places_outside_the_epoch_are_refused(places: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="outside an epoch of 10 samples"):
        sample_indices(0, 0, 10, *places)


@settings(deadline=None)
@given(SIZES, st.integers(1, 50), st.integers(0, 5000))
def test_windows_follow_each_other_and_stay_in_their_epoch(n: int, global_batch: int, position: int) -> None:
    window = next_window(position, n, global_batch)
    assert window.epoch * n + window.start == position
    assert window.next_position == position + window.samples
    assert 1 <= window.samples <= global_batch
    assert window.stop <= n
    assert window.samples == global_batch or window.stop == n
    assert window.dropped == 0


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.booleans())
def test_an_epoch_has_as_many_windows_as_announced(n: int, global_batch: int, drop_last: bool) -> None:
    if drop_last and n < global_batch:
        return
    windows = epoch_windows(n, global_batch, drop_last)
    assert len(windows) == windows_per_epoch(n, global_batch, drop_last)
    assert sum(w.samples + w.dropped for w in windows) == n
    assert windows[-1].next_position == n


def test_drop_last_says_how_many_it_dropped() -> None:
    assert epoch_windows(5, 2, drop_last=True) == [Window(0, 0, 2, 2), Window(0, 2, 4, 5, dropped=1)]
    # A position inside the tail, as left by a run that kept short windows:
    assert next_window(4, 5, 2, drop_last=True) == Window(1, 0, 2, 7, dropped=1)
    assert next_window(2, 3, 3, drop_last=True) == Window(1, 0, 3, 6, dropped=1)


def test_drop_last_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="3 samples are fewer than"):
        next_window(0, 3, 4, drop_last=True)


@pytest.mark.parametrize(("position", "n", "batch"), [(-1, 5, 2), (0, 0, 2), (0, 5, 0)])
def test_impossible_windows_are_refused(position: int, n: int, batch: int) -> None:
    with pytest.raises(UsageError, match="no window at position"):
        next_window(position, n, batch)


@settings(deadline=None)
@given(SIZES, st.integers(1, 9), st.integers(1, 6), st.integers(0, 3), st.integers(1, 9), SEEDS)
def test_every_world_sees_the_same_micro_batches_and_each_sample_once(
    n: int, micro: int, per_window: int, epoch: int, world: int, seed: int
) -> None:
    places: list[int] = []
    for window in epoch_windows(n, micro * per_window):
        batches = micro_batches(window, micro)
        assert all(len(batch) == micro for batch in batches[:-1])
        shares = [number for rank in range(world) for number in rank_share(len(batches), rank, world)]
        assert shares == list(range(len(batches)))  # contiguous, in rank order: the same numbers for every world
        places += [place for number in shares for place in batches[number]]
    assert places == list(range(n))
    assert sorted(sample_indices(seed, epoch, n, 0, n)[places].tolist()) == list(range(n))


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(1, 64))
def test_shares_are_even_and_nested(total: int, world: int) -> None:
    shares = [rank_share(total, rank, world) for rank in range(world)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for rank, share in enumerate(shares):
        left, right = rank_share(total, 2 * rank, 2 * world), rank_share(total, 2 * rank + 1, 2 * world)
        assert [*left, *right] == list(share)


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(UsageError, match="rank 2 of world size 2"):
        rank_share(4, 2, 2)
    with pytest.raises(UsageError, match="micro_batch_size 0"):
        micro_batches(Window(0, 0, 4, 4), 0)
