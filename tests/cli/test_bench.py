"""`shardrun bench` as a program: real contenders, a rank that fails, a Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from shardrun.bench.ranks import COMMAND
from tests.support.launching import ROOT, shardrun, started, until, write_config
from tests.support.training import RECIPES


def config(folder: Path, **sections: object) -> Path:
    return write_config(folder, recipe="bench_net", train={"steps": 100, "micro_batch_size": 2, "global_batch_size": 4},
                        topology={"timeout_s": 40}, **sections)  # type: ignore[arg-type]  # fmt: skip


def test_the_same_work_is_measured_under_each_and_nothing_is_left(tmp_path: Path) -> None:
    assert (RECIPES / "bench_net.py").exists()
    words = ["bench", config(tmp_path), "--against", "ddp", "--rounds", "1", "--steps", "2", "--json"]
    with started(shardrun(*words), tmp_path, {"TMPDIR": str(tmp_path)}) as program:
        assert program.wait(100) == 0, program.stderr
        assert program.left(2) == {}
    document = json.loads(program.stdout)
    table = {one["name"]: one for one in document["contenders"]}
    assert {name: one["status"] for name, one in table.items()} == {
        "compute": "floor", "shardrun": "valid", "ddp": "reference",
    }  # fmt: skip
    assert all(len(one["rounds_s"][0]) == 2 and one["first_window_s"] > 0.1 for one in table.values())
    assert document["weight_per_step"] == 4 * 8
    assert program.stderr.splitlines() == [f"round 1 of 1: {name}" for name in ("ddp", "compute", "shardrun")]
    assert not [path for path in os.listdir(tmp_path) if path.startswith("shardrun-")]
    assert not (tmp_path / "run").exists()


def failing(folder: Path, fault: str, **sections: object) -> list[str]:
    """Only `compute` and `shardrun`, of which the first one fails."""
    path = write_config(folder, recipe_args={"fault": fault, "at": 3}, train={"steps": 100}, **sections)  # type: ignore[arg-type]
    return shardrun("bench", path, "--against", "", "--rounds", "1", "--steps", "4")


@pytest.mark.parametrize(
    ("fault", "sections", "code", "told"),
    [
        ("raise", {}, 1, ["compute, round 1: rank 1 failed at step 3, phase window", "  ValueError: bad label 7"]),
        ("kill", {}, 1, ["compute, round 1: rank 1 killed by signal 9 (possibly out of memory) at step 3"]),
        ("sleep", {"topology": {"timeout_s": 8}}, 5, ["LaunchError: not done after 8 s, all that topology"]),
    ],
)  # fmt: skip
@pytest.mark.sample(1)
def test_a_rank_that_fails_is_told_with_its_error(
    tmp_path: Path, fault: str, sections: dict[str, object], code: int, told: list[str]
) -> None:
    with started(failing(tmp_path, fault, **sections), tmp_path, {"TMPDIR": str(tmp_path)}) as program:
        assert program.wait(60) == code, program.stderr
        assert program.left(2) == {}
    assert all(text in program.stderr for text in told), program.stderr
    assert not [path for path in os.listdir(tmp_path) if path.startswith("shardrun-")]


def test_a_stop_that_comes_before_a_rank_has_begun_ends_it(tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"body": "time:sleep", "limit_s": 60, "run_dir": str(tmp_path)}))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # as the launcher starts its workers
    try:
        rank = subprocess.Popen(COMMAND, env={**os.environ, "PYTHONPATH": str(ROOT), "SHARDRUN_JOB": str(job)})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    rank.terminate()
    assert rank.wait(20) == -signal.SIGTERM


def test_ctrl_c_ends_all_of_it(tmp_path: Path) -> None:
    with started(failing(tmp_path, "sleep"), tmp_path) as program:
        until(lambda: len(program.ranks()) == 2 or program.process.poll() is not None, 60, "no two ranks have begun")
        program.signal(signal.SIGINT)
        assert program.wait(60) == 130
        assert program.left(5) == {}
    assert "error: stopped in compute, round 1; nothing is compared" in program.stderr
