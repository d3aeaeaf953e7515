"""topology.max_restarts: a failed world is followed by a new one that goes on; refusals and stops are not."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from shardrun.checkpoint.store import newest
from shardrun.errors import (
    CallMismatch,
    CheckpointError,
    CommunicatorError,
    DivergenceError,
    NonFiniteError,
    ShardrunError,
    StepFailed,
)
from shardrun.run.failure import describe
from shardrun.run.metrics import read_rows
from shardrun.run.outcome import RankEnd, judge, lost_end
from shardrun.run.restarts import announcement, may_pass
from shardrun.run.status import Status
from tests.support.launching import Program, final_tensors, pretended, shardrun, started, until, write_config

pytestmark = pytest.mark.sample(4)


def ended(command: list[str], folder: Path) -> tuple[int, Program]:
    with started(command, folder) as program:
        code = program.wait(120)
        assert program.left(0.5) == {}
        return code, program


def rows(folder: Path) -> list[dict[str, Any]]:
    """What training gave, without what the clock gave."""
    return [
        {key: value for key, value in row.items() if key not in ("seconds", "tokens_per_s")}
        for row in read_rows(folder / "run" / "metrics.jsonl")
    ]


def restarts(program: Program) -> list[str]:
    return [line for line in program.stdout.splitlines() if line.startswith("restart ")]


def seven_steps(folder: Path, at: int | None, **topology: int) -> Path:
    """A config whose rank 1 is killed in the window number `at` of each world."""
    return write_config(
        folder,
        recipe_args={"fault": "" if at is None else "kill", "at": at or 0},
        train={"steps": 7, "max_grad_norm": 1.0},
        optimizer={"name": "adamw"},
        checkpoint={"every": 2, "keep": 9},
        topology=topology,
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that nobody kills."""
    folder = tmp_path_factory.mktemp("straight")
    code, program = ended(shardrun("train", seven_steps(folder, None)), folder)
    assert (code, program.stderr) == (0, "")
    return folder


def test_a_rank_that_is_killed_twice_costs_nothing_but_time(tmp_path: Path, straight: Path) -> None:
    """Killed at steps 4 and 6 of 7, the checkpoints being of 1, 2, 4 and 6."""
    code, program = ended(shardrun("train", seven_steps(tmp_path, 4, max_restarts=2)), tmp_path)
    assert (code, program.stderr) == (0, "")
    killed = "rank 1 killed by signal 9 (possibly out of memory) at step"
    going_on = f"phase forward; going on from {tmp_path}/run/checkpoints/step-000000000"
    assert restarts(program) == [f"restart 1 of 2: {killed} 4, {going_on}2", f"restart 2 of 2: {killed} 6, {going_on}4"]
    assert re.findall(r"^step (\d)/7", program.stdout, re.MULTILINE) == ["1", "2", "3", "3", "4", "5", "5", "6", "7"]
    assert final_tensors(tmp_path / "run") == final_tensors(straight / "run")
    assert rows(tmp_path) == rows(straight)
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == [1, 2, 3, 4, 5, 6, 7]
    for rank in (0, 1):
        log = (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert [line for line in log if line.startswith("restart")] == restarts(program)
    assert json.loads((tmp_path / "run" / "exit.json").read_text())["exit_code"] == 0


def test_torchrun_restarts_ranks_that_go_on(tmp_path: Path, straight: Path) -> None:
    """torch's elastic agent starts all ranks again, each of which goes on from the last checkpoint."""
    elastic = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    code, program = ended([*elastic, "-m", "shardrun", "train", str(seven_steps(tmp_path, 6))], tmp_path)
    assert code == 0, program.stderr
    assert re.findall(r"^resumed at step (\d)", program.stdout, re.MULTILINE) == ["4"]
    assert final_tensors(tmp_path / "run") == final_tensors(straight / "run")
    assert rows(tmp_path) == rows(straight)


def test_the_last_failure_counts_once_there_are_no_restarts_left(tmp_path: Path) -> None:
    deeds = {"1": {"at": 2, "do": "raise"}}
    code, program = ended(pretended(tmp_path, max_restarts=2, deeds=deeds), tmp_path)
    assert code == 1
    failed = "rank 1 failed at step 2, phase forward: ValueError: bad label 7; no checkpoint yet, from the beginning"
    assert restarts(program) == [f"restart 1 of 2: {failed}", f"restart 2 of 2: {failed}"]
    screen = program.stderr.splitlines()
    assert screen[:2] == ["rank 1 failed at step 2, phase forward", "  ValueError: bad label 7"]
    assert screen[-1] == "exit code 1 (training failed)"
    document = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert (document["exit_code"], document["rank"], document["step"]) == (1, 1, 2)
    assert (tmp_path / "run" / "logs" / "rank-1.log").read_text().count("Traceback") == 3


def test_what_was_asked_for_at_the_start_does_not_hold_for_later_worlds(tmp_path: Path) -> None:
    """A branch from another run goes on from its own checkpoint once it has one."""
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    topology = {"world_size": 1, "max_restarts": 1}
    assert ended(shardrun("train", write_config(one, train={"steps": 2}, topology=topology)), one)[0] == 0
    config = write_config(
        two,
        recipe_args={"fault": "kill", "rank": 0, "at": 5},  # two losses in a window
        train={"steps": 5},
        topology=topology,
        checkpoint={"every": 1},
    )
    words = ["--resume-from", one / "run", "--accept-changes"]
    code, program = ended(shardrun("train", config, *words), two)
    assert code == 0, program.stdout + program.stderr
    assert re.findall(r"^resumed at step (\d) from (\S+)/run/", program.stdout, re.MULTILINE) == [
        ("2", str(one)),
        ("4", str(two)),
    ]


def test_a_world_that_has_saved_what_it_was_to_stop_at_is_not_followed_by_one_that_runs_past_it(tmp_path: Path) -> None:
    topology = {"world_size": 1, "max_restarts": 1}
    config = write_config(tmp_path, recipe_args={"save_s": 1.0}, train={"steps": 9}, topology=topology)
    with started(shardrun("train", config, "--stop-at", "2"), tmp_path) as program:
        until(lambda: program.stdout.count("saving") == 2, 60, "no second save")
        program.kill_rank(0)
        assert program.wait() == 1
    found = newest(tmp_path / "run")
    assert found is not None
    assert (found.step, restarts(program)) == (2, [])


@pytest.mark.parametrize("do", ["refuse", "stop"])
def test_refusals_and_stops_are_not_tried_again(tmp_path: Path, do: str) -> None:
    options: dict[str, Any] = {"max_restarts": 3, "steps": 1000}
    if do == "refuse":
        options["deeds"] = {"1": {"at": 2, "do": "refuse"}}
    with started(pretended(tmp_path, **options), tmp_path) as program:
        if do == "stop":
            program.until("step 2/1000")
            program.signal(signal.SIGTERM)
        assert program.wait() == (3 if do == "refuse" else 75)
        assert program.left(0.5) == {}
    assert restarts(program) == []


def test_a_stop_that_comes_while_a_world_fails_starts_no_other(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_restarts": 3, "steps": 1000, "save_s": 60, "deeds": {"1": {"at": 3, "do": "sleep"}}}
    with started(pretended(tmp_path, **options), tmp_path) as program:
        program.until("step 2/1000")
        program.signal(signal.SIGTERM)
        program.until("finishing the step")
        program.kill_rank(1)
        assert program.wait() == 1
    assert restarts(program) == []


def test_a_ctrl_c_between_two_worlds_stops_the_next(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "max_restarts": 1000,
        "steps": 1000,
        "step_s": 0.01,
        "deeds": {"1": {"at": 2, "do": "kill"}},
    }
    with started(pretended(tmp_path, **options), tmp_path) as program:
        program.until("restart 2 of 1000")
        program.signal(signal.SIGINT)
        assert program.wait() in (1, 75)
        assert program.left(0.5) == {}
    assert "SIGINT: finishing the step" in program.stdout
    assert len(restarts(program)) < 6


def end(rank: int, error: Exception | None = None, code: int = 1) -> RankEnd:
    failure = None if error is None else describe(error, rank, Status(5, "reduce", 9))
    return RankEnd(rank, code, Status(5, "reduce", 9), failure, ended_by_us=False, time=1.0)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([end(0, code=-9)], True),
        ([end(0, code=0)], True),
        ([end(0, ValueError("bad label"))], True),
        ([end(0, CommunicatorError("collective failed"))], True),
        ([end(0, StepFailed("gone", step=5, phase="reduce", gradients_kept=True))], True),
        ([end(0, CallMismatch("the ranks are in different operations"))], False),
        ([end(0, ShardrunError("no update was made"))], False),
        ([end(0, CheckpointError("damaged"))], False),
        ([end(0, NonFiniteError("NaN"))], False),
        ([end(0, DivergenceError("w is not the same on all ranks"))], False),
        ([end(0, code=-9), lost_end(1, "node 1 (b)", "it closed the connection")], False),
    ],
)
def test_only_what_may_pass_is_tried_again(ends: list[RankEnd], expected: bool) -> None:
    assert may_pass(judge(ends, 10, stopping=False, interrupted=False)) is expected


def test_an_announcement_is_one_line() -> None:
    outcome = judge([end(0, ValueError("one\ntwo"))], 10, stopping=False, interrupted=False)
    assert announcement(outcome, 1, 3, None) == (
        "restart 1 of 3: rank 0 failed at step 5, phase reduce: ValueError: one; no checkpoint yet, from the beginning"
    )
