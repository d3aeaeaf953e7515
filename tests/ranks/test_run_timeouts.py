"""The times of a run: for the rendezvous, for saves and restores, for everything else."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_process import Seat
from tests.support.ranks import run_ranks
from tests.support.training import RECIPES, Trained, document, train

pytestmark = pytest.mark.sample(2)

NET = str(RECIPES / "train_two_layers.py")
SHORT_S, LATE_S = 1.5, 3.0


def late(folder: Path, place: str, save_timeout_s: float, timeout_s: float = SHORT_S, **more: Any) -> Trained:
    """Four updates of two ranks, of which rank 1 comes late to one collective."""
    config = document(
        folder,
        2,
        {
            "train": {"steps": 4},
            "checkpoint": {"every": 2},
            "topology": {"timeout_s": timeout_s, "save_timeout_s": save_timeout_s},
        },
        NET,
    )
    return train(config, fault=f"delay rank 1 by {LATE_S} s at {place}", **more)


def test_a_save_may_take_longer_than_anything_else(tmp_path: Path) -> None:
    assert late(tmp_path / "a", "save:7 of step 2", 60.0).codes == [0, 0]
    short = late(tmp_path / "b", "save:7 of step 2", SHORT_S, timeout_s=60.0)
    assert short.codes == [1, 1]
    assert re.search(rf"phase save\) failed on rank 0: timed out after {SHORT_S} s; rank 1 is missing", short.errors[0])


def test_a_restore_may_too(tmp_path: Path) -> None:
    for name, save_timeout_s, timeout_s, codes in (("a", 60.0, SHORT_S, [0, 0]), ("b", SHORT_S, 60.0, [1, 1])):
        assert late(tmp_path / name, "data of step 99", 60.0, 60.0, stop_at=2).codes == [75, 75]
        number = _number_of(tmp_path / name, "agree: checkpoint vote")
        resumed = late(tmp_path / name, f"collective {number}", save_timeout_s, timeout_s)
        assert resumed.codes == codes, resumed.errors


def _number_of(folder: Path, call: str) -> int:
    """Which collective of a start that goes on it is, from what a start knows that fails after it."""
    config = document(folder, 2, {"train": {"steps": 4}, "checkpoint": {"every": 2}}, NET)
    job = {"config": config, "run_dir": str(folder), "options": {"fault": "fail rank 1 at data"}}
    found = run_ranks(2, _history, job, open_comm=False, debug="OFF", timeout_s=60)
    return int(re.findall(rf"^ *(\d+) .*: {call}$", found[1], re.MULTILINE)[-1])


def _history(seat: Seat, job: dict[str, Any]) -> str:
    os.environ |= {"RANK": str(seat.rank), "WORLD_SIZE": str(seat.world_size), "SHARDRUN_INIT_FILE": seat.init_file}
    from shardrun.run.tether import Tether
    from shardrun.run.worker import run_worker

    tether = Tether.from_env()
    assert tether.run(lambda tied: run_worker(job, tied)) == 1
    assert tether.failure is not None
    return tether.failure.traceback


def test_everything_else_keeps_its_time_after_a_save(tmp_path: Path) -> None:
    done = late(tmp_path, "gather:1 of step 3", 60.0)
    assert done.codes == [1, 1]
    assert re.search(
        rf"phase gather\) failed on rank 0: timed out after {SHORT_S} s; rank 1 is missing", done.errors[0]
    )


def _alone(seat: Seat, job: dict[str, Any]) -> tuple[int, str, float]:
    """One rank of two that come to no rendezvous."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "SHARDRUN_INIT_FILE": seat.init_file}
    from shardrun.run.tether import Tether
    from shardrun.run.worker import run_worker

    tether, began = Tether.from_env(), time.monotonic()
    code = tether.run(lambda tied: run_worker(job, tied))
    assert tether.failure is not None
    return code, tether.failure.message, time.monotonic() - began


@pytest.mark.parametrize("init_timeout_s", [1.0, 3.0])
def test_a_rendezvous_has_its_own_time(tmp_path: Path, init_timeout_s: float) -> None:
    config = document(tmp_path, 2, {"topology": {"timeout_s": 60, "init_timeout_s": init_timeout_s}}, NET)
    job = {"config": config, "run_dir": str(tmp_path), "options": {}}
    ((code, told, seconds),) = run_ranks(1, _alone, job, open_comm=False, debug="OFF", timeout_s=60)
    assert code != 0
    assert "init_timeout_s" in told
    assert init_timeout_s <= seconds < init_timeout_s + 10
