"""Balanced groups: what members add for a text cancels exactly when the members of every group are of one mind."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardrun.comm.fingerprint import HASHES, MAX_BALANCED, MAX_RANKS, balance

# Few texts, so that groups of one mind, of two minds and with swapped texts all come up.
_TEXTS = st.sampled_from(["", "sgd", "adamw", "sgd lr=0.1", "sgd lr=0.2"])
_GROUPS = st.lists(st.lists(_TEXTS, min_size=1, max_size=6), min_size=1, max_size=MAX_BALANCED)


def _added(groups: Sequence[Sequence[str]]) -> list[int]:
    """What an all-reduce over all members of all groups gives."""
    total = [0] * HASHES
    for number, texts in enumerate(groups):
        for rank, text in enumerate(texts):
            numbers = balance(text, rank, len(texts), salt=f"group {number}")
            total = [one + other for one, other in zip(total, numbers, strict=True)]
    return total


@given(_GROUPS)
@settings(max_examples=300, deadline=None)
def test_the_sum_is_zero_exactly_when_every_group_is_of_one_mind(groups: list[list[str]]) -> None:
    of_one_mind = all(len(set(texts)) == 1 for texts in groups)
    assert (_added(groups) == [0] * HASHES) == of_one_mind


@given(st.text(), st.text(), st.integers(2, 40), st.data())
@settings(max_examples=200, deadline=None)
def test_one_member_of_another_mind_shows_wherever_it_is(text: str, other: str, size: int, data: st.DataObject) -> None:
    texts = [text] * size
    assert _added([texts]) == [0] * HASHES
    texts[data.draw(st.integers(0, size - 1))] = other
    assert (_added([texts]) == [0] * HASHES) == (text == other)


def test_differences_of_two_groups_do_not_cancel_each_other() -> None:
    assert _added([["a", "b"], ["b", "a"]]) != [0] * HASHES


def test_two_minds_of_equal_weight_do_not_cancel() -> None:
    assert _added([["a", "b", "a", "b"]]) != [0] * HASHES
    assert _added([["a", "b", "b", "a"]]) != [0] * HASHES


def test_another_salt_is_another_mind() -> None:
    sums = zip(balance("a", 0, 2, "x"), balance("a", 1, 2, "y"), strict=True)
    assert [one + other for one, other in sums] != [0] * HASHES


@pytest.mark.parametrize("size", [1, 2, 3, 64])
def test_all_three_numbers_take_part(size: int) -> None:
    numbers = balance("a", 0, size, "x")
    assert len(numbers) == HASHES
    assert len(set(numbers)) == (1 if size == 1 else HASHES)
    assert (numbers == [0] * HASHES) == (size == 1)


def test_sums_of_the_largest_world_stay_inside_int64() -> None:
    # A member adds less than 2 ** 44 and rank 0 of a group less than 2 ** 44 for each other member, so all positive
    # (or all negative) numbers of 8 texts on 2 ** 15 ranks stay below 2 ** 62, in whatever order they are added.
    members = [balance(f"text {k}", k + 1, MAX_RANKS, "x") for k in range(2000)]
    assert all(-(2**44) < number <= 0 for numbers in members for number in numbers)
    assert min(min(numbers) for numbers in members) < -(2**43)  # and the bits are used
    root = balance("text", 0, MAX_RANKS, "x")
    assert all(0 <= number < (MAX_RANKS - 1) * 2**44 for number in root)
    assert MAX_BALANCED * MAX_RANKS * 2**44 <= 2**62


def test_the_largest_world_of_one_mind_cancels_to_the_last_bit() -> None:
    total = balance("a", 0, MAX_RANKS, "x")
    for rank in range(1, MAX_RANKS):
        total = [one + other for one, other in zip(total, balance("a", rank, MAX_RANKS, "x"), strict=True)]
    assert total == [0] * HASHES
