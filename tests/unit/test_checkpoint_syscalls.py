"""A sample of the kills of tests/checkpoints/kills.py, which kills a saver at every system call."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardrun.checkpoint.load import load
from shardrun.comm.communicator import Communicator
from tests.checkpoints.kills import FAST, SCENES, sweep
from tests.checkpoints.syscalls import run_traced, unavailable

WHY = unavailable()
pytestmark = pytest.mark.skipif(WHY != "", reason=WHY)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder where an fsync costs nothing."""
    with tempfile.TemporaryDirectory(prefix="kills-", dir=FAST) as name:
        yield Path(name)


@pytest.mark.parametrize("name", SCENES)
def test_a_save_killed_at_a_system_call_leaves_the_previous_or_the_new(folder: Path, name: str) -> None:
    swept = sweep(SCENES[name], folder / "scene", sample=12, seed=len(name))
    assert swept.kept + swept.published == 12
    assert swept.calls.count("fsync") >= 14  # 5 files and the nonce, LATEST, and every folder that got a name
    assert swept.calls.count("renameat2") >= 1
    loaded = load(folder / "scene" / "whole", Communicator.single(), {})
    assert loaded is not None
    assert loaded.step == SCENES[name].step


def test_every_changing_call_counts_and_the_one_before_which_it_dies_is_not_made(folder: Path) -> None:
    def work() -> None:
        descriptor = os.open(folder / "new", os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(descriptor, b"x")
        os.fsync(descriptor)
        os.rename(folder / "new", folder / "named")
        (folder / "named").read_bytes()
        os.unlink(folder / "named")

    traced = run_traced(work)
    assert [call.removesuffix("at") for call in traced.calls] == ["open", "write", "fsync", "rename", "unlink"]
    assert (traced.killed, traced.code) == (False, 0)
    ended = run_traced(work, kill_before=5)
    assert (ended.killed, len(ended.calls)) == (True, 5)
    assert (folder / "named").read_bytes() == b"x"
    assert not run_traced(lambda: None, kill_before=1).killed
