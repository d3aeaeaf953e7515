"""What one rank of `bench --collectives` does: every case on every rank, in the same order."""

from __future__ import annotations

from typing import Any

import pytest

import shardrun as sr
from shardrun.bench.collectives_rank import measure
from tests.support.ranks import run_ranks

MIB = 1 << 20


def _measured(comm: sr.Communicator) -> list[dict[str, Any]]:
    found = measure(comm, [MIB, 1000], repeats=2)
    comm.agree("afterwards")
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_measures_every_case(world_size: int) -> None:
    ranks = run_ranks(world_size, _measured)
    plain = [[(case["name"], case["bytes"], case["times"]) for case in cases] for cases in ranks]
    assert all(one == plain[0] for one in plain)
    whole = {2: MIB, 3: 3 * 4 * 256 * -(-MIB // (3 * 4 * 256))}[world_size]  # slices of whole multiples of 256 elements
    least = world_size * 4 * 256
    assert {nbytes for _, nbytes, _ in plain[0]} == {whole, least, 0}
    ways = [f"{what} by {way}" for way in ("native", "exchange", "shared memory") for what in ("reduce", "gather")]
    assert [name for name, nbytes, _ in plain[0] if nbytes == whole] == [*ways, "all_reduce", "copy"]
    assert [case[:2] for case in plain[0][-2:]] == [("agreement", 0), ("agreement over sockets", 0)]
    laps = [lap for cases in ranks for case in cases for one in case["rounds"] for lap in one]
    assert all(begin < end for begin, end in laps)
    assert {len(case["rounds"]) for cases in ranks for case in cases} == {2}
