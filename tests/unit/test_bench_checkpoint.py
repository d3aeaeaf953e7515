"""What several ranks measured of saves and loads, put together and shown."""

from __future__ import annotations

import pytest

from shardrun import report
from shardrun.bench.checkpoint import BACKGROUND, CONTENDERS, summary
from shardrun.cli.bench_checkpoint import checkpoint_view

_FIGURES = [f"{work}_{what}" for work in ("save", "load", "cached_load") for what in ("s", "cpu_s", "memory_bytes")]


def rank(seconds: list[float], pause: float) -> dict[str, dict[str, list[float]]]:
    every = {name: {**dict.fromkeys(_FIGURES, seconds), "bytes": [3e6] * 3} for name in CONTENDERS}
    aside = {"pause_s": [pause] * 3, "published_after_s": [2.0] * 3, "save_memory_bytes": [1e6] * 3}
    return {**every, BACKGROUND: aside}


def test_a_figure_is_that_of_the_slower_rank_in_each_round() -> None:
    found = summary([rank([1.0, 2.0, 7.0], 0.1), rank([3.0, 1.0, 6.0], 0.3)])
    assert found["contenders"]["DCP"]["save_s"] == {"median": 3.0, "min": 2.0, "max": 7.0}
    assert found["pause_of_save"] == pytest.approx(0.1)


def test_all_of_it_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = summary([rank([1.0, 2.0, 7.0], 0.1), rank([3.0, 1.0, 6.0], 0.3)])
    report.show(checkpoint_view({**found, "world_size": 2, "device": "cpu", "torch": "2.0", "rounds": 3}))
    shown = capsys.readouterr().out
    assert all(f"{name} " in shown for name in CONTENDERS)
    assert "3.000 (2.000 to 7.000)" in shown
    assert "10.0 % of a save" in shown.replace("\n", " ")
