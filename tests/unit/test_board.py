"""The board of signals: what watches the other processes is let go of, however its making ends."""

from __future__ import annotations

import gc
import mmap
import os

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
