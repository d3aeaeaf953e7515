"""The cost model of collectives: its lines, ranks that share cores, worlds between and beyond, and its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrun.comm.cost_model import AGREEMENT, COPY, Line, Links, fit, fit_links, read_links, save_links, travels
from shardrun.errors import UsageError

MIB = 1 << 20
REDUCE, GATHER = "reduce by exchange", "gather by exchange"


@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-8))
def test_a_fit_finds_the_line_that_the_points_are_on(latency: float, slope: float) -> None:
    found = fit([(nbytes, latency + slope * nbytes) for nbytes in (MIB, 16 * MIB, 256 * MIB)])
    for nbytes in (MIB, 64 * MIB, 1024 * MIB):
        assert found.seconds(nbytes) == pytest.approx(latency + slope * nbytes, rel=1e-6)


def test_small_and_large_count_alike_in_a_fit() -> None:
    """By relative errors: 20 % too much at either end."""
    line = Line(1e-3, 1e-9)
    off = fit(
        [(MIB, 1.2 * line.seconds(MIB)), (256 * MIB, line.seconds(256 * MIB)), (16 * MIB, line.seconds(16 * MIB))]
    )
    assert all(abs(off.seconds(n) / line.seconds(n) - 1) < 0.2 for n in (MIB, 16 * MIB, 256 * MIB))


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(0, 2e-3), (0, 2e-3)], Line(2e-3, 0.0)),
        ([(MIB, 1e-3)], Line(0.0, 1e-3 / MIB)),
        ([(MIB, 1e-3), (2 * MIB, 4e-3)], Line(0.0, 1.2e-3 / MIB)),  # through them: a latency below 0
        ([(MIB, 2e-3), (2 * MIB, 1e-3)], Line(1.2e-3, 0.0)),  # and a time per byte below 0
    ],
)
def test_neither_latency_nor_time_per_byte_is_below_zero(points: list[tuple[float, float]], line: Line) -> None:
    found = fit(points)
    assert (found.latency_s, found.seconds_per_byte) == pytest.approx(
        (line.latency_s, line.seconds_per_byte), rel=1e-9, abs=0
    )
    squares = sum((found.seconds(n) / t - 1) ** 2 for n, t in points)
    for other in (
        Line(found.latency_s * 1.01 + 1e-9, found.seconds_per_byte),
        Line(found.latency_s, found.seconds_per_byte * 1.01),
    ):
        assert squares <= sum((other.seconds(n) / t - 1) ** 2 for n, t in points) + 1e-12


def links(cores: int | None = 2, **lines: dict[int, Line]) -> Links:
    return Links("gloo", cores, 1, {name.replace("_", " "): one for name, one in lines.items()})


def test_ranks_that_share_cores_take_their_share_of_time() -> None:
    known = links(2, copy={2: Line(0.0, 1e-10), 8: Line(0.0, 1e-10)})
    assert [known.crowd(ranks) for ranks in (1, 2, 3, 8)] == [1, 1, 1.5, 4]
    assert known.seconds(COPY, 1e9, 2) == pytest.approx(0.1)
    assert known.seconds(COPY, 1e9, 8) == pytest.approx(0.4)
    assert known.seconds(COPY, 1e9, 2, sharing=8) == pytest.approx(0.4)  # two of eight ranks
    assert Links("gloo", 8, 4, {}).crowd(4) == 2  # four threads each
    assert Links("nccl", None, 1, {}).crowd(64) == 1


def test_between_measured_worlds_and_beyond_them() -> None:
    known = links(None, agreement={2: Line(2e-3, 4e-9), 4: Line(3e-3, 2e-9)})
    found = {ranks: known.line(AGREEMENT, ranks) for ranks in (1, 2, 3, 4, 8)}
    assert [one.latency_s for one in found.values()] == pytest.approx([2e-3, 2e-3, 2.5e-3, 3e-3, 5e-3])
    assert [one.seconds_per_byte for one in found.values()] == pytest.approx([4e-9, 4e-9, 3e-9, 2e-9, 2e-9])
    alone = links(None, agreement={4: Line(3e-3, 0.0)})
    assert {alone.line(AGREEMENT, ranks).latency_s for ranks in (2, 4, 64)} == {3e-3}
    falling = links(None, agreement={2: Line(2e-3, 0.0), 4: Line(1e-3, 0.0)})
    assert falling.line(AGREEMENT, 64).latency_s == 1e-3  # and never below 0


def test_links_give_back_what_they_were_fitted_to() -> None:
    """On two cores: lines of ranks that have one each, stretched again when they are used."""
    true = {(name, n): Line(1e-4 * n, 5e-10) for name in (REDUCE, GATHER) for n in (2, 4, 8)}
    measured = [
        (name, n, nbytes, max(1, n / 2) * line.seconds(travels(name, nbytes, n)))
        for (name, n), line in true.items()
        for nbytes in (MIB, 16 * MIB, 256 * MIB)
    ]
    cached = [(COPY, 2, MIB, 1e-5), (COPY, 2, 256 * MIB, 0.05)]
    found = fit_links([*measured, *cached, (AGREEMENT, 2, 0, 1e-3)], "gloo", 2, 1, "2.13")
    for name, n, nbytes, seconds in measured:
        assert found.seconds(name, travels(name, nbytes, n), n) == pytest.approx(seconds)
    assert found.seconds(COPY, 256 * MIB, 2) == pytest.approx(0.05)  # whatever a cache can do
    assert found.seconds(AGREEMENT, 0, 2, calls=4) == pytest.approx(4e-3)
    assert (found.worlds, found.ways) == ([2, 4, 8], ["exchange"])


def test_a_rank_sends_what_others_own() -> None:
    assert [travels(GATHER, 1024, n) for n in (2, 4, 8)] == [512, 768, 896]
    assert travels(COPY, 1024, 4) == 1024


# ---- the file --------------------------------------------------------------------------------------------------------

KNOWN = fit_links([(REDUCE, 2, MIB, 1e-3), (AGREEMENT, 2, 0, 1e-3)], "gloo", 2, 1, "2.13")


def test_the_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    for known in (KNOWN, Links("nccl", None, 1, KNOWN.lines, "2.13")):
        save_links(known, tmp_path / "links.json")
        assert read_links(tmp_path / "links.json") == known


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "format 'shardrun links', version 2; expected 'shardrun links', 1"),
        ({"cores": 0}, "0 where a number of at least 1"),
        ({"cores": "many"}, "could not convert"),
        ({"lines": {AGREEMENT: {}}}, "a line without a world"),
        ({"lines": {AGREEMENT: {"2": {"latency_s": float("nan"), "seconds_per_byte": 0}}}}, "nan where a number"),
        ({"lines": {AGREEMENT: {"2": {"latency_s": -1, "seconds_per_byte": 0}}}}, "-1 where a number of at least 0"),
        ({"lines": {AGREEMENT: {"2": {"latency_s": 1}}}}, "KeyError: 'seconds_per_byte'"),
        ({"lines": [1]}, "AttributeError"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "links.json"
    path.write_text(json.dumps({**KNOWN.to_json(), **change}))
    with pytest.raises(UsageError) as caught:
        read_links(path)
    assert str(caught.value).startswith(f"{path}: no links that `shardrun bench --collectives --save FILE` wrote")
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '"links"', "\x00", '{"format": "shardrun links"}'])
def test_no_links_at_all(tmp_path: Path, text: str) -> None:
    path = tmp_path / "links.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="no links that"):
        read_links(path)
