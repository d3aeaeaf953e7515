"""What `bench --collectives` makes of what ranks measured; how they measure it: tests/ranks/test_collectives.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardrun.bench import collectives
from shardrun.bench.collectives import Asked, Row, faster, measure_links, misses, rows_of, to_json
from shardrun.cli.app import app
from shardrun.cli.collectives_view import collectives_view
from shardrun.comm.cost_model import AGREEMENT, AGREEMENT_SENT, COPY, fit_links, gather_by, read_links, reduce_by
from shardrun.errors import UsageError

MIB = 1 << 20


def case(*rounds: list[tuple[float, float]], name: str = COPY, times: int = 1) -> dict[str, Any]:
    return {"name": name, "bytes": MIB, "times": times, "rounds": rounds}


def test_a_round_takes_from_the_first_that_begins_to_the_last_that_is_done() -> None:
    ranks = [[case([(0.0, 1.0)], [(10.0, 11.0)], [(20.0, 26.0)])], [case([(0.5, 3.0)], [(10.0, 10.5)], [(21.0, 22.0)])]]
    assert rows_of(ranks) == [Row(COPY, 2, MIB, 3.0, 1.0, 6.0)]
    (row,) = rows_of([[case([(0.0, 4.0)], times=8)]])
    assert (row.seconds, row.gb_per_s) == (0.5, MIB / 0.5 / 1e9)


@pytest.mark.parametrize("name", [AGREEMENT, AGREEMENT_SENT])
def test_an_agreement_takes_from_the_last_that_comes_to_it(name: str) -> None:
    first = case([(0.0, 5.0), (6.0, 8.0), (9.0, 9.5)], name=name)
    second = case([(4.0, 4.5), (6.5, 7.0), (9.0, 20.0)], name=name)
    assert rows_of([[first], [second]]) == [Row(name, 2, MIB, 1.5, 1.5, 1.5)]  # of 1, 1.5 and 11


def measured(**ways: float) -> list[Row]:
    """Rows of each way, which takes so many ms to reduce 1 MiB and half of that to gather it; 16 times that for 16."""
    found = [Row(AGREEMENT, 2, 0, 1e-3, 1e-3, 1e-3)]
    for way, ms in ways.items():
        for name, part in ((reduce_by(way), 1.0), (gather_by(way), 0.5)):
            for mib in (1, 16):
                seconds = part * mib * ms / 1000
                found.append(Row(name, 2, mib * MIB, seconds, seconds, seconds))
    return found


def test_the_fastest_way_of_every_world_and_size() -> None:
    rows = measured(native=4.0, exchange=1.0, shared=0.5)
    small, large = faster(rows)
    assert (small.world_size, small.bytes, small.way) == (2, MIB, "shared")
    assert small.seconds == pytest.approx(0.75e-3)
    assert small.times == {"native": pytest.approx(8.0), "exchange": pytest.approx(2.0)}
    assert (large.bytes, large.way) == (16 * MIB, "shared")


def test_the_model_misses_by_a_part_of_what_was_measured() -> None:
    rows = measured(exchange=1.0)
    links = fit_links(((row.name, 2, row.bytes, row.seconds) for row in rows), "gloo", 2, 1, "2.13")
    assert [misses(links, row) for row in rows] == pytest.approx([0.0] * 5)
    late = Row(AGREEMENT, 2, 0, 2e-3, 2e-3, 2e-3)
    assert misses(links, late) == pytest.approx(-0.5)


def test_what_is_shown_names_the_fastest() -> None:
    rows = measured(native=4.0, exchange=1.0)
    links = fit_links(((row.name, 2, row.bytes, row.seconds) for row in rows), "gloo", 2, 1, "2.13")
    parts = list(collectives_view(to_json(rows, links)))
    texts = "\n".join(part for part in parts if isinstance(part, str))
    assert "an agreement of 2 ranks, after the last has come to it: 1,000 us (1,000 to 1,000)" in texts
    assert "2 ranks, 16 MiB: exchange is the fastest to reduce and gather, in 24 ms; native takes 4.00 x" in texts


def test_more_memory_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(collectives, "_available_bytes", lambda: 100 * MIB)
    with pytest.raises(UsageError) as caught:
        measure_links(Asked([2, 4], [MIB, 16 * MIB]), tmp_path, print)
    assert str(caught.value) == (
        "--mib: 4 ranks need about 320 MiB for buckets of 16 MiB, and 100 MiB are free; "
        "give smaller buckets or fewer ranks"
    )


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--world", "1,2"], "--world: '1,2' given, expected whole numbers of at least 2 with commas between"),
        (["--world", "2.5"], "--world: '2.5' given"),
        (["--mib", "many"], "--mib: 'many' given, expected numbers of at least"),
        (["--mib", "0"], "--mib: '0' given"),
        (["--mib", "1e999"], "--mib: '1e999' given"),
        (["--save", "nowhere/links.json"], "--save: no folder nowhere; make it first"),
        (["my.yaml"], "--collectives measures without a config, and my.yaml is given; leave one of them out"),
    ],
)
def test_what_cannot_be_meant(words: list[str], said: str) -> None:
    found = CliRunner().invoke(app, ["bench", "--collectives", *words])
    assert (found.exit_code, said in found.output) == (2, True), found.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no CONFIG is given; name the config to measure, or --collectives"),
        (["my.yaml", "--world", "2,4"], "--world: '2,4' given, expected one number; several worlds are for --coll"),
        (["--collectives", "--checkpoint"], "--checkpoint has no effect in bench --collectives; leave it out"),
        (["--collectives", "--steps", "3"], "--steps has no effect in bench --collectives; leave it out"),
        (["my.yaml", "--checkpoint", "--mib", "2"], "--mib has no effect in bench --checkpoint; leave it out"),
        (["my.yaml", "--pairs", "4", "--against", "plain"], "--against has no effect in bench --pairs; leave it out"),
        (["my.yaml", "--save", "links.json"], "--save has no effect in bench without --collectives; leave it out"),
        (["my.yaml", "--world", "0"], "--world: '0' given, expected whole numbers of at least 1"),
    ],
)
def test_what_cannot_be_meant_of_a_config(words: list[str], said: str) -> None:
    found = CliRunner().invoke(app, ["bench", *words])
    assert (found.exit_code, said in found.output) == (2, True), found.output


def test_the_command_measures_shows_and_saves(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    words = ["--world", "2", "--mib", "0.25,1", "--rounds", "1", "--save", str(path), "--json"]
    found = CliRunner().invoke(app, ["bench", "--collectives", *words])
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    links = read_links(path)
    assert document["links"] == links.to_json()
    assert links.ways == ["native", "exchange", "shared memory"]
    assert {row["bytes"] for row in document["rows"]} == {0, MIB // 4, MIB}
    assert all(0 < row["least"] <= row["seconds"] <= row["most"] for row in document["rows"])
    assert [one["bytes"] for one in document["faster"]] == [MIB // 4, MIB]
