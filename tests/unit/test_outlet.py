"""An outlet to a pipe whose reader pauses: nobody waits, what is left out is said, what is kept comes in order."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardrun.run.outlet import Outlet


@contextmanager
def piped() -> Iterator[tuple[int, Outlet, list[str]]]:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    said: list[str] = []
    with os.fdopen(write, "w", encoding="ascii") as stream:
        yield read, Outlet(stream, lambda count: f"({count} left out)\n", lambda: said.append("gone")), said


def drained(read: int, until: bytes) -> bytes:
    shown = b""
    while until not in shown:
        shown += os.read(read, 4096)
    return shown


def test_what_finds_no_room_is_left_out_and_told() -> None:
    with piped() as (read, outlet, _):
        line = "x" * 99 + "\n"
        began = time.monotonic()
        for _ in range(1000):
            outlet.put(line, 20_000)
        outlet.put("kept\n", 1_000_000)
        assert time.monotonic() - began < 2
        outlet.flush(0.1)
        assert time.monotonic() - began < 4
        shown = drained(read, b"kept\n").decode()
        outlet.close()
        os.close(read)
    *lines, note, last = shown.splitlines(keepends=True)
    assert last == "kept\n"
    assert set(lines) == {line}
    assert 200 <= len(lines) <= 250
    assert note == f"({1000 - len(lines)} left out)\n"


def test_closing_waits_for_a_reader_that_reads_and_for_no_other() -> None:
    with piped() as (read, outlet, _):
        outlet.put("y" * 10_000, 1 << 20)
        began = time.monotonic()
        outlet.close()
        assert 1.5 < time.monotonic() - began < 5
        os.close(read)


def test_a_reader_that_is_gone_is_told_once_and_what_cannot_be_encoded_is_escaped() -> None:
    with piped() as (read, outlet, said):
        outlet.put("\u00e4\n", 100)
        assert drained(read, b"\n") == b"\\xe4\n"
        os.close(read)
        for _ in range(3):
            outlet.put("z\n", 100)
            outlet.flush()
        outlet.close()
    assert said == ["gone"]
