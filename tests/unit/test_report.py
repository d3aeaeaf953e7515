"""Lines, tables, JSON and events as text; and what a screen does with them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardrun import report
from shardrun.errors import CheckpointError, StepFailed
from shardrun.report import train_screen
from shardrun.run.failure import describe
from shardrun.run.outcome import Outcome, RankEnd, judge
from shardrun.run.status import Status

STEP = {"event": "step", "step": 3, "total_steps": 10, "loss": 2.5, "lr": 3e-4, "grad_norm": 0.5}


def test_a_table_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    report.table("parameters", ["path", "numel"], [["a.weight", 12], ["b", 3000]])
    assert capsys.readouterr().out.splitlines() == [
        "parameters",
        "  path      numel",
        "  --------  -----",
        "  a.weight     12",
        "  b          3000",
    ]


def test_an_empty_table_has_its_head(capsys: pytest.CaptureFixture[str]) -> None:
    report.table("none", ["path"], [])
    assert capsys.readouterr().out == "none\n  path\n  ----\n"


def test_json_is_strict_and_has_a_schema_version(capsys: pytest.CaptureFixture[str]) -> None:
    report.json_document({"a": float("nan"), "b": [float("inf"), Path("x")], "3": (True, None, "ä")})
    document = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert document == {"schema_version": 1, "a": "nan", "b": ["inf", "x"], "3": [True, None, "ä"]}


def test_a_step_is_one_line() -> None:
    event = {**STEP, "tokens_per_s": 12345.6, "memory_mb": 300.2, "eta_s": 3725.0, "epoch": 1, "tokens": 7}
    assert report.event_lines(event) == [
        "step 3/10  epoch 1  loss 2.5000  lr 0.0003  norm 0.5  12,346 tok/s  300 MB  eta 1:02:05"
    ]
    assert report.event_lines({"event": "step", "step": 3, "total_steps": None, "loss": None, "skipped": "empty"}) == [
        "step 3  skipped (empty)"
    ]


def test_every_event_reads_as_plain_lines() -> None:
    start = {"event": "start", "world_size": 2, "device": "cpu", "backend": "gloo", "first_step": 4, "total_steps": 10}
    start["transport"] = "shared memory"
    device = {"device": "cuda:0", "backend": "nccl", "transport": "NCCL"}
    table = {"title": "groups", "columns": ["name"], "rows": [["all"]]}
    texts: dict[str, dict[str, Any]] = {
        "2 ranks on cpu (gloo over shared memory), steps 5 to 10|groups|  name|  ----|  all": {
            **start, "tables": [table]},
        "1 rank on cpu (gloo), from step 5": {**start, "world_size": 1, "total_steps": None},
        "2 ranks on cpu (gloo over shared memory), all 10 steps done": {**start, "first_step": 10},
        "2 ranks on cuda:0 (nccl), steps 5 to 10": {**start, **device},
        "resumed at step 4 from runs/x/checkpoints/step-4": {
            "event": "resumed", "step": 4, "path": "runs/x/checkpoints/step-4"},
        "eval at step 4: loss 2.123, tokens 70": {
            "event": "eval", "step": 4, "loss": 2.1234, "tokens": 70, "bits_per_byte": None},
        "saved step 4: p (1.23 MB, 0.5 s)": {
            "event": "checkpoint", "step": 4, "path": "p", "bytes": 1234567, "seconds": 0.5},
        "saved step 1: p (1.23 MB, 0.5 s)|disk: 1.23 MB for each of up to 3 checkpoints that stand at a time, and "
        "there is room for 2,000 more": {
            "event": "checkpoint", "step": 1, "path": "p", "bytes": 1234567, "seconds": 0.5, "most": 3, "fits": 2000},
        "saved step 1: p (1.23 MB, 0.5 s)|disk: 1.23 MB for each of up to 3 checkpoints that stand at a time, and "
        "there is room for 1 more: NOT enough; free some, or lower checkpoint.keep": {
            "event": "checkpoint", "step": 1, "path": "p", "bytes": 1234567, "seconds": 0.5, "most": 3, "fits": 1},
        "[rank 1] warning: a|[rank 1] warning: b": {"event": "warning", "rank": 1, "text": "a\nb"},
        "stopped at step 4, saved as p": {"event": "stopped", "step": 4, "path": "p"},
        "finished at step 10": {"event": "finished", "step": 10, "already": False},
        "already finished at step 10: nothing to do": {"event": "finished", "step": 10, "already": True},
        "hello": {"event": "note", "text": "hello"},
        "": {"event": "unknown"},
    }  # fmt: skip
    for text, event in texts.items():
        assert "|".join(report.event_lines(event)) == text


def test_a_screen_returns_the_lines_that_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    with report.TrainScreen() as screen:
        lines = screen.event(0, STEP) + screen.event(0, {**STEP, "step": 4})
        screen.output(1, "[bold]as it is[/bold]")
    shown = capsys.readouterr().out.splitlines()
    assert shown == [*lines, "[rank 1] [bold]as it is[/bold]"]
    assert lines[0] == "step 3/10  loss 2.5000  lr 0.0003  norm 0.5"
    assert lines[1].startswith("step 4/10")
    assert lines[1].endswith("eta 0:00")


def test_the_first_step_that_a_command_makes_says_how_long_after_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    start = {"event": "start", "world_size": 2, "device": "cpu", "backend": "gloo", "total_steps": 10}
    start["transport"] = "shared memory"
    monkeypatch.setattr(train_screen, "_BEGAN", time.monotonic() - 2.0)
    resumed, restarted = {**start, "first_step": 2}, {**start, "first_step": 4}
    with report.TrainScreen() as screen:
        screen.event(0, resumed)
        lines = screen.event(0, STEP) + screen.event(0, {**STEP, "step": 4})
        screen.event(0, restarted)
        lines += screen.event(0, {**STEP, "step": 5})
    assert ["2.0 s after the start" in line for line in lines] == [True, False, False]
    with report.TrainScreen() as screen:
        screen.event(0, {**start, "first_step": 0})
        assert "after the start" not in screen.event(0, STEP)[0], "steps before it were not shown"


def test_step_lines_can_be_left_out_and_stay_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    with report.TrainScreen(steps=False) as screen:
        assert len(screen.event(0, STEP)) == 1
        screen.event(0, {"event": "note", "text": "shown"})
    assert capsys.readouterr().out == "shown\n"


def test_a_json_screen_shows_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with report.TrainScreen(json=True) as screen:
        screen.event(0, STEP)
        screen.output(1, "text")
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"schema_version": 1, "rank": 0, "since_start_s": None, "eta_s": None, **STEP}
    assert second == {"schema_version": 1, "event": "output", "rank": 1, "text": "text"}


# ---- the end -------------------------------------------------------------------------------------------------------


def failed(error: BaseException | None, code: int = 1) -> Outcome:
    place = Status(2, "forward", 5)
    ends = [
        RankEnd(0, -9, place, None, ended_by_us=True, time=2.0),
        RankEnd(1, code, place, None if error is None else describe(error, 1, place), ended_by_us=False, time=1.0),
        RankEnd(2, -9, place, None, ended_by_us=True, time=2.0),
    ]
    return judge(ends, 10, stopping=False, interrupted=False)


def test_one_screen_tells_what_failed_and_how_to_go_on() -> None:
    try:
        raise ValueError("bad label 7")
    except ValueError as error:
        result = failed(error)
    assert result.culprit is not None
    assert result.culprit.failure is not None
    place = f"{__file__}:{result.culprit.failure.line}"
    assert report.failure_lines(result, Path("runs/x"), "shardrun train c.yaml", Path("runs/x/checkpoints/step-1")) == [
        "rank 1 failed at step 2, phase forward",
        "  ValueError: bad label 7",
        f"    at {place} in test_one_screen_tells_what_failed_and_how_to_go_on",
        "ranks 0, 2: ended with it",
        "log:             runs/x/logs/rank-1.log",
        "last checkpoint: runs/x/checkpoints/step-1",
        "go on with:      shardrun train c.yaml",
        "exit code 1 (training failed)",
    ]


def test_an_error_raised_on_purpose_needs_no_frames() -> None:
    lines = report.failure_lines(failed(CheckpointError("damaged\nand more")), Path("runs/x"), "again", None)
    assert lines[1:3] == ["  damaged", "  and more"]
    assert lines[-3:] == [
        "last checkpoint: none yet",
        "start again:     again",
        "exit code 3 (checkpoint missing, damaged or unfit)",
    ]


def test_the_same_error_on_other_ranks_is_folded_into_one_line() -> None:
    place = Status(5, "vote", 9)
    ends = []
    for rank in range(4):
        told = (
            f"step 5 failed in phase vote: communicator closed at collective 9 failed on rank {rank}: 3 of 4 said yes"
        )
        error = StepFailed(told, step=5, phase="vote", gradients_kept=True)
        ends.append(RankEnd(rank, 1, place, describe(error, rank, place), ended_by_us=False, time=float(rank)))
    result = judge(ends, 10, stopping=False, interrupted=False)
    lines = report.failure_lines(result, Path("run"), "again", None)
    assert lines[0] == "rank 0 failed at step 5, phase vote"
    assert lines[2] == "ranks 1, 2, 3: the same error"


def test_a_long_message_is_cut_on_the_screen() -> None:
    text = "\n".join(f"line {number}" for number in range(100))
    lines = report.failure_lines(failed(CheckpointError(text)), Path("runs/x"), "again", None)
    assert "  ... 80 more lines in the log" in lines
    assert len(lines) < 30


def test_a_message_cannot_steer_the_terminal() -> None:
    lines = report.failure_lines(
        failed(ValueError("\x1b[2J\x1b[31mred\x00\tü \ud800\x9b")), Path("runs/x"), "again", None
    )
    assert lines[1] == "  ValueError: \\x1b[2J\\x1b[31mred\\x00\tü \\ud800\\x9b"
    left = report.failure_lines(failed(SystemExit("a\n\x1b[2J")), Path("runs/x"), "again", None)
    assert left[0] == "rank 1 left at step 2 of 10 with code 1: a\\n\\x1b[2J"


def test_an_endless_line_is_cut_on_the_screen() -> None:
    lines = report.failure_lines(failed(ValueError("x" * 5000)), Path("runs/x"), "again", None)
    assert lines[1].endswith("xxx... 4,014 more characters in the log")
    assert len(lines[1]) < 1100


def test_the_command_to_go_on_is_never_cut() -> None:
    again = "shardrun train c.yaml " + "recipe_args.hidden=64 " * 100
    assert f"start again:     {again}" in report.failure_lines(failed(ValueError("bad")), Path("runs/x"), again, None)


def test_an_error_without_a_message_is_its_type() -> None:
    lines = report.failure_lines(failed(KeyboardInterrupt()), Path("runs/x"), "again", None)
    assert lines[1] == "  KeyboardInterrupt"


def test_sys_exit_is_told_with_its_place() -> None:
    try:
        sys.exit(3)
    except SystemExit as error:
        result = failed(error)
    assert result.culprit is not None
    assert result.culprit.failure is not None
    place = f"{__file__}:{result.culprit.failure.line} in test_sys_exit_is_told_with_its_place"
    assert report.failure_lines(result, Path("runs/x"), "again", None)[:3] == [
        "rank 1 left at step 2 of 10 with code 3",
        "  SystemExit in phase forward",
        f"    at {place}",
    ]


def test_a_screen_on_a_terminal_is_a_bar_that_fits_the_line() -> None:
    import os
    import pty
    import subprocess
    import sys

    script = (
        "from shardrun.report import TrainScreen\n"
        "with TrainScreen() as screen:\n"
        f"    screen.event(0, {STEP!r}); screen.output(1, 'hello'); screen.event(0, { ({**STEP, 'step': 4})!r})\n"
    )
    parent, child = pty.openpty()
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=child, cwd=root, env=env)
    os.close(child)
    shown = b""
    try:
        while chunk := os.read(parent, 4096):
            shown += chunk
    except OSError:  # the terminal's other end is closed
        pass
    os.close(parent)
    assert process.wait() == 0
    assert b"step 4/10  loss 2.5000  lr 0.0003  norm 0.5" in shown
    assert b"[rank 1] hello\r\n" in shown
    assert b"\x1b[?25h" in shown  # the cursor is back
