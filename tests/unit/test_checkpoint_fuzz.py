"""A few thousand of the million inputs of `make fuzz`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardrun.records.header_parser import parse_header
from tests.checkpoints import fuzz
from tests.checkpoints.fuzz import Found, Fuzz, little_memory


def run(count: int, seed: int) -> Found:
    found = Found()
    with little_memory():
        Fuzz(seed).run(count, found)
    return found


def test_mutated_headers_and_manifests_are_read_or_refused() -> None:
    found = run(4000, seed=2)
    assert found.wrong == []
    assert sum(found.ends.values()) == 4000
    assert found.slowest_s < 1
    # Some of each get through: else the mutations would all stop at the first check.
    for kind in (
        "header read",
        "header refused",
        "manifest refused",
        "sealed manifest read",
        "sealed manifest refused",
    ):
        assert found.ends[kind] > 20, found.ends


def breaks() -> None:
    raise KeyError("x")


def takes_memory() -> None:
    bytearray(2 * fuzz.MOST_MEMORY)


def hangs() -> None:
    while True:
        pass


@pytest.mark.parametrize(("harm", "told"), [(breaks, "KeyError"), (takes_memory, "MemoryError"), (hangs, "Timeout")])
def test_a_reader_that_breaks_takes_memory_or_hangs_is_found(
    monkeypatch: pytest.MonkeyPatch, harm: Callable[[], None], told: str
) -> None:
    def weak(raw: bytes | bytearray, data_bytes: int) -> object:
        try:
            return parse_header(raw, data_bytes)
        except ValueError:
            harm()
            raise

    monkeypatch.setattr("shardrun.records.header.parse_header", weak)
    monkeypatch.setattr(fuzz, "HANG_S", 0.2)
    assert any(told in line for line in run(8, seed=2).wrong)
