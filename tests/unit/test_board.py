"""The board of signals: what watches the other processes is let go of, however its making ends."""

from __future__ import annotations

import gc
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardrun.comm.board import BOARD_BYTES, Board, knows_order

pytestmark = pytest.mark.skipif(not knows_order(), reason="signals go over gloo on this machine")


def _pages(count: int) -> list[mmap.mmap]:
    return [mmap.mmap(-1, BOARD_BYTES) for _ in range(count)]


def _descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_a_board_that_cannot_be_made_leaves_no_descriptor() -> None:
    own, first, second = _pages(3)
    before = _descriptors()
    with pytest.raises(ProcessLookupError):
        Board(own, [None, first, second], [os.getpid(), os.getpid(), 2**22 + 1], str)
    assert _descriptors() == before


@pytest.mark.parametrize("closed", [False, True])
def test_a_board_that_is_dropped_leaves_no_descriptor(closed: bool) -> None:
    own, other = _pages(2)
    before = _descriptors()
    board = Board(own, [None, other], [os.getpid()] * 2, str)
    assert _descriptors() == before + 1
    if closed:
        board.close()
    del board
    assert _descriptors() == before


def test_texts_of_any_length_arrive_whole_among_sums() -> None:
    pages = _pages(2)
    boards = [
        Board(pages[0], [None, pages[1]], [os.getpid()] * 2, str),
        Board(pages[1], [pages[0], None], [os.getpid()] * 2, str),
    ]
    sizes = [(0, 0), (5, 0), (16_376, 16_376), (16_377, 1), (3, 100_000), (70_000, 50_000)]
    texts = [[os.urandom(size) for size in pair] for pair in sizes]

    def meet(rank: int) -> list[tuple[list[bytes], list[int]]]:
        return [
            (boards[rank].gather(pair[rank], 10), boards[rank].sum([rank, at], 10)) for at, pair in enumerate(texts)
        ]

    with ThreadPoolExecutor(2) as ranks:
        found = list(ranks.map(meet, range(2)))
    assert found == [[(pair, [1, 2 * at]) for at, pair in enumerate(texts)]] * 2


def test_a_text_that_meets_an_exchange_is_an_error_on_both() -> None:
    pages = _pages(2)
    first = Board(pages[0], [None, pages[1]], [os.getpid()] * 2, str)
    second = Board(pages[1], [pages[0], None], [os.getpid()] * 2, str)
    number = second.signal(True)
    with pytest.raises(RuntimeError, match="1 is in an exchange, this rank in an agreement"):
        first.gather(b"text", 10)
    with pytest.raises(RuntimeError, match="0 is in an agreement, this rank in an exchange"):
        second.hear(number, 10)


def test_who_comes_when_another_has_given_up_hears_of_it() -> None:
    pages = _pages(2)
    first = Board(pages[0], [None, pages[1]], [os.getpid()] * 2, "rank {}".format)
    late = Board(pages[1], [pages[0], None], [os.getpid()] * 2, "rank {}".format)
    with pytest.raises(TimeoutError, match="no signal of rank 1"):
        first.sum([1], 0.01)
    with pytest.raises(RuntimeError, match="rank 0 had given up when this rank came"):
        late.sum([1], 10)
