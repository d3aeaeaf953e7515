"""Public bug reports about launching and watching ranks, against the real program. One test per case id."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from shardrun.checkpoint.store import scan
from tests.support.launching import Program, pretended, shardrun, started, write_config


def ended(config: Path, *words: str) -> tuple[int, Program]:
    """Train to the end; nothing may be left a moment later."""
    with started(shardrun("train", config, *words), config.parent) as program:
        code = program.wait(120)
        assert program.left(0.5) == {}
        return code, program


def saved_steps(folder: Path) -> list[int]:
    """Steps of the good checkpoints, newest first; a bad one fails."""
    found = scan(folder / "run")
    assert all(one.complete for one in found), found
    return [one.step for one in found]


@pytest.mark.parametrize("source", ["missing", "empty"])
def test_c080_nothing_to_resume_from_is_an_error_before_a_start(tmp_path: Path, source: str) -> None:
    config = write_config(tmp_path)
    named = tmp_path / source
    if source == "empty":
        named.mkdir()
    code, program = ended(config, "--resume-from", str(named))
    assert (code, program.stdout) == (3, "")
    assert str(named) in program.stderr
    code, program = ended(config, "checkpoint.resume=required")
    assert (code, program.stdout) == (3, "")
    assert str(tmp_path / "run") in program.stderr
    assert not (tmp_path / "run").exists()


def test_c111_two_jobs_on_one_machine_do_not_meet(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    commands = [shardrun("train", write_config(tmp_path / name)) for name in ("a", "b")]
    with started(commands[0], tmp_path) as one, started(commands[1], tmp_path) as two:
        assert (one.wait(120), two.wait(120)) == (0, 0), one.stderr + two.stderr
    assert saved_steps(tmp_path / "a") == saved_steps(tmp_path / "b") == [5, 1]
    # Ten times over, with ranks that talk through the very socket that the launcher made for them.
    for turn in range(10):
        commands = [pretended(tmp_path, run=f"{name}{turn}", steps=2) for name in ("a", "b")]
        with started(commands[0], tmp_path) as one, started(commands[1], tmp_path) as two:
            assert (one.wait(), two.wait()) == (0, 0), one.stderr + two.stderr


@pytest.mark.parametrize(("to_group", "moment"), [(True, "step 2/"), (False, "saving")])
def test_c112_ctrl_c_saves_and_leaves_nothing_behind(tmp_path: Path, to_group: bool, moment: str) -> None:
    arguments = {"step_s": 0.05, "save_s": 1.0 if moment == "saving" else 0.0}
    config = write_config(tmp_path, recipe_args=arguments, train={"steps": 1000})
    with started(shardrun("train", config), tmp_path) as program:
        program.until(moment)
        if to_group:
            os.killpg(program.process.pid, signal.SIGINT)
        else:
            program.signal(signal.SIGINT)
        program.until("stopped at step")
        saved = time.monotonic()
        assert program.wait(10) == 75
        assert program.left(max(0.0, saved + 10 - time.monotonic())) == {}
    stopped = int(re.findall(r"stopped at step (\d+)", program.stdout)[0])
    assert saved_steps(tmp_path)[0] == stopped
    assert program.stdout.count("SIGINT: finishing the step and saving") == 1
    assert "Traceback" not in program.stdout + program.stderr
    assert program.stderr == ""


def test_c112_a_second_ctrl_c_stops_now(tmp_path: Path) -> None:
    config = write_config(tmp_path, recipe_args={"save_s": 600}, train={"steps": 1000})
    with started(shardrun("train", config), tmp_path) as program:
        program.until("saving")
        program.signal(signal.SIGINT)
        program.until("finishing the step")
        time.sleep(0.3)
        program.signal(signal.SIGINT)
        assert program.wait(10) == 130
        assert program.left(0.5) == {}
    assert saved_steps(tmp_path) == [1]
    assert program.stderr.splitlines()[0] == "interrupted, nothing saved"
    assert "Traceback" not in program.stdout + program.stderr


def test_c113_a_name_error_in_the_recipe_fails_the_command(tmp_path: Path) -> None:
    code, program = ended(write_config(tmp_path, recipe="launch_name_error"))
    assert code != 0
    assert "NameError: name 'width' is not defined" in program.stderr
    assert "launch_name_error.py:9" in program.stderr
    assert (program.stdout + program.stderr).count("NameError") == 1


def test_c113_c114_an_error_on_one_rank_is_shown_once_with_its_place(tmp_path: Path) -> None:
    code, program = ended(write_config(tmp_path, recipe_args={"fault": "raise"}))
    assert code == 1
    screen = program.stderr.splitlines()
    assert screen[:2] == ["rank 1 failed at step 2, phase forward", "  ValueError: bad label 7"]
    assert re.fullmatch(r"    at .*/launch_linear\.py:\d+ in _go_wrong", screen[2])
    assert (program.stdout + program.stderr).count("bad label 7") == 1
    assert "rank 0: freed by it (agree of step 2)" in screen
    assert len(screen) <= 12
    assert "Traceback" not in program.stdout + program.stderr
    assert saved_steps(tmp_path) == [1]
    assert f"last checkpoint: {tmp_path}/run/checkpoints/step-0000000001" in screen


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("exit3", "rank 1 left at step 2 of 5 with code 3"),
        ("exit_text", "rank 1 left at step 2 of 5 with code 1: no more data"),
        ("os_exit0", "rank 1 left at step 2 of 5 with code 0"),
    ],
)
def test_c117_every_early_end_is_a_failure(tmp_path: Path, fault: str, said: str) -> None:
    """A worker that is killed by a signal is c119."""
    code, program = ended(write_config(tmp_path, recipe_args={"fault": fault}))
    assert code == 1
    assert program.stderr.splitlines()[0] == said


@pytest.mark.parametrize("rank", [1, 0])
def test_c119_a_killed_rank_ends_the_run_and_keeps_the_checkpoint(tmp_path: Path, rank: int) -> None:
    arguments = {"fault": "kill", "rank": rank, "at": 3}
    config = write_config(tmp_path, recipe_args=arguments, checkpoint={"every": 1}, topology={"timeout_s": 600})
    begun = time.monotonic()
    code, program = ended(config)
    assert time.monotonic() - begun < 30
    assert code == 1
    assert program.stderr.startswith(
        f"rank {rank} killed by signal 9 (possibly out of memory) at step 3, phase forward"
    )
    assert saved_steps(tmp_path) == [2, 1]


def test_c120_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    timeout_s = 5
    config = write_config(tmp_path, recipe_args={"fault": "sleep"}, topology={"timeout_s": timeout_s})
    with started(shardrun("train", config), tmp_path) as program:
        program.until("saved step 1")
        begun = time.monotonic()
        assert program.wait(60) == 1
        assert time.monotonic() - begun < timeout_s + 8
        assert program.left(0.5) == {}
    said = re.match(
        r"rank 1 is missing from collective \d+ \((backward|agree|reduce) of step 2\): it was at step 2, "
        r"phase forward, for (\d+) s when rank 0 gave up\n",
        program.stderr,
    )
    assert said is not None, program.stderr
    assert timeout_s - 1 <= int(said[2]) <= timeout_s + 4


def test_c131_each_line_comes_once_and_a_warning_of_rank_1_is_marked(tmp_path: Path) -> None:
    code, program = ended(write_config(tmp_path, recipe_args={"fault": "warn", "at": 3}))
    assert (code, program.stderr) == (0, "")
    lines = program.stdout.splitlines()
    for step in range(1, 6):
        assert len([line for line in lines if line.startswith(f"step {step}/5 ")]) == 1
    assert len([line for line in lines if line.startswith("2 ranks on cpu")]) == 1
    warned = [line for line in lines if "odd value" in line]
    assert len(warned) == 1
    assert warned[0].startswith("[rank 1] warning: UserWarning: odd value (")


def test_c135_the_log_and_the_screen_agree(tmp_path: Path) -> None:
    """To a file and to a pipe: the same lines. What the ranks print is marked on the screen, and in their own logs."""
    shown: dict[str, list[str]] = {}
    for kind in ("file", "pipe"):
        folder = tmp_path / kind
        folder.mkdir()
        config = write_config(folder, recipe_args={"fault": "print"})
        command = shardrun("train", config)
        if kind == "pipe":
            command = ["bash", "-c", 'set -o pipefail; "$@" | cat', "bash", *command]
        with started(command, folder) as program:
            assert program.wait(120) == 0, program.stderr
        shown[kind] = program.stdout.splitlines()
        for rank in (0, 1):
            log = (folder / "run" / "logs" / f"rank-{rank}.log").read_text().splitlines()
            prints = [f"user print {number}" for number in range(1, 6)]
            assert [line for line in log if line.startswith("user")] == prints
            marked = [line for line in shown[kind] if line.startswith(f"[rank {rank}] user")]
            assert marked == [f"[rank {rank}] {text}" for text in prints]
            warned = [line for line in shown[kind] if line.startswith(f"[rank {rank}] warning: UserWarning: odd value")]
            assert len(warned) == 1
            assert warned[0] in log
            steps = [line for line in shown[kind] if line.startswith("step ")]
            assert [line for line in log if line.startswith("step ")] == (steps if rank == 0 else [])
            assert len(steps) == 5
    results: list[Any] = [[line.split("  lr")[0] for line in shown[kind] if line.startswith("step ")] for kind in shown]
    assert results[0] == results[1]
