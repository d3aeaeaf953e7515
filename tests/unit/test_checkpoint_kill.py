"""A saver that gets SIGKILL before any of its state-changing calls: exactly the old checkpoint or the new one."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from shardrun.checkpoint.store import CHECKPOINTS, scan
from shardrun.records import durable
from tests.golden.runs import at_call, put, require_newest, visible


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that it wrote; only a power cut would, and fsync is most of a save's time here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def killed_before(number: int, work: Callable[[], object]) -> bool:
    """Do `work` in a child that is killed before its `number`-th call; whether it came to that."""
    child = os.fork()
    if child == 0:
        durable.on_io = at_call(number, lambda path: os.kill(os.getpid(), signal.SIGKILL))
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def kill_everywhere(tmp_path: Path, start: Path, step: int, keep: int | None) -> list[int]:
    """Kill a save of `step` onto a copy of `start` before each of its calls; the newest step after each kill."""
    outcomes = []
    for number in range(1, 300):
        run_dir = tmp_path / str(number)
        shutil.copytree(start, run_dir)
        killed = killed_before(number, lambda run_dir=run_dir: put(run_dir, step, keep=keep))  # type: ignore[misc]
        newest, *older = scan(run_dir)
        require_newest(run_dir, newest.step)
        assert all(found.complete for found in older)
        outcomes.append(newest.step)
        if not killed:
            break
        if number % 6 == 0 or newest.step == step:  # go on, as the next run would
            put(run_dir, 9, keep=1)
            require_newest(run_dir, 9)
            assert {name.split("/")[0] for name in visible(run_dir)} == {"LATEST", "step-0000000009"}
            assert not list((run_dir / CHECKPOINTS / ".trash").iterdir())
        shutil.rmtree(run_dir)
    assert outcomes[-1] == step
    return outcomes


@pytest.mark.timeout(300)
def test_killed_anywhere_in_a_save_with_retention(tmp_path: Path) -> None:
    put(tmp_path / "start", 2)
    put(tmp_path / "start", 3)
    outcomes = kill_everywhere(tmp_path, tmp_path / "start", 4, keep=1)
    assert set(outcomes) == {3, 4}
    assert outcomes == sorted(outcomes)  # before the rename the old, after it the new
    assert outcomes.count(3) > 25
    assert outcomes.count(4) > 15  # LATEST and the removal of two old ones


@pytest.mark.timeout(300)
def test_killed_anywhere_in_the_first_save_of_all(tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    outcomes: list[int] = []
    killed = True
    while killed:
        run_dir = tmp_path / str(len(outcomes))
        shutil.copytree(tmp_path / "start", run_dir)
        killed = killed_before(len(outcomes) + 1, lambda run_dir=run_dir: put(run_dir, 1))  # type: ignore[misc]
        found = scan(run_dir)
        outcomes.append(len(found))
        if found:
            require_newest(run_dir, 1)
    assert set(outcomes) == {0, 1}
    assert len(outcomes) > 35


@pytest.mark.timeout(300)
def test_killed_anywhere_while_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    put(tmp_path / "start", 2)
    put(tmp_path / "start", 4)
    number, kills = 30, 0  # the writing of files is the same as above; from here to the end it is not
    while True:
        run_dir = tmp_path / str(number)
        shutil.copytree(tmp_path / "start", run_dir)
        killed = killed_before(number, lambda run_dir=run_dir: put(run_dir, 4, keep=1))  # type: ignore[misc]
        assert scan(run_dir)[0].step == 4
        require_newest(run_dir, 4)
        shutil.rmtree(run_dir)
        if not killed:
            break
        number, kills = number + 1, kills + 1
    assert kills > 20
