"""checkpoint.async: training goes on while files are written, and all else is as with a save in the foreground."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from shardrun.checkpoint.inspect import inspect
from shardrun.checkpoint.reshard import reshard
from shardrun.checkpoint.store import newest, scan
from shardrun.records import durable
from tests.golden.runs import visible
from tests.golden.state import same_tensors
from tests.ranks.test_groups_train import moe
from tests.support import training
from tests.support.rank_process import Seat
from tests.support.ranks import run_ranks
from tests.support.training import RECIPES, Trained, document, trained

pytestmark = pytest.mark.sample(6)

PLAIN = str(RECIPES / "run_plain.py")
STEPS = 6


def config(
    run_dir: Path, *, background: bool, steps: int = STEPS, every: int = 1, split: bool = False, **args: int
) -> dict[str, Any]:
    """A net with buffers and ties under AdamW on two ranks; every checkpoint stays."""
    return document(
        run_dir,
        2,
        {
            "optimizer": {"name": "adamw", "lr": 0.1},
            "train": {"steps": steps, "micro_batch_size": 2, "global_batch_size": 4},
            "checkpoint": {"every": every, "keep": 100, "async": background, "split_model": split},
        },
        PLAIN,
        **args,
    )


def states(run_dir: Path) -> dict[str, bytes]:
    """The data of every tensor file of every checkpoint: they depend on the state alone, a header names the run."""
    files = {name: raw for name, raw in visible(run_dir).items() if name.endswith(".safetensors")}
    return {name: raw[8 + int.from_bytes(raw[:8], "little") :] for name, raw in files.items()}


def order(done: Trained) -> list[tuple[str, int]]:
    return [(e["event"], e["step"]) for e in done.events if e["event"] in ("step", "checkpoint", "stopped")]


# ---- a disk that is slow, or fails -----------------------------------------------------------------------------------


def _on_disk(seat: Seat, job: dict[str, Any], rank: int, seconds: float, fails: str, at_step: int) -> Any:
    """A start of a run where `rank` waits before each new file, and where its `fails` (a call) fails from a step on."""

    def on_io(call: str, path: Path) -> None:
        if seat.rank != rank or path.suffix != ".safetensors":
            return
        if call == "create":
            time.sleep(seconds)
        if call == fails and f"step-{at_step:010d}" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    durable.on_io = on_io
    return training._work(seat, job)


def train_on_disk(
    config: dict[str, Any], *, rank: int = 1, seconds: float = 0.0, fails: str = "", at_step: int = 0, **options: Any
) -> Trained:
    run_dir = Path(config["run"]["dir"])
    run_dir.mkdir(parents=True, exist_ok=True)
    job = {"config": config, "run_dir": str(run_dir), "options": options}
    ended = run_ranks(2, _on_disk, job, rank, seconds, fails, at_step, timeout_s=90, open_comm=False, debug="OFF")
    codes, errors, events, places = (list(column) for column in zip(*ended, strict=True))
    return Trained(codes, errors, events[0], run_dir, places=places)


@pytest.fixture(scope="module")
def foreground(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The same run, saved in the foreground after every window."""
    return trained(config(tmp_path_factory.mktemp("foreground"), background=False))


@pytest.mark.parametrize("slow", [0, 1])
def test_every_checkpoint_has_the_bytes_of_one_saved_in_the_foreground(
    foreground: Trained, tmp_path: Path, slow: int
) -> None:
    done = train_on_disk(config(tmp_path, background=True), rank=slow, seconds=0.02)
    assert done.codes == [0, 0], done.errors
    assert states(tmp_path) == states(foreground.run_dir)
    assert len(states(tmp_path)) == STEPS * 5
    assert [found.step for found in scan(tmp_path) if found.complete] == [*range(STEPS, 0, -1)]
    assert order(done).index(("step", 2)) < order(done).index(("checkpoint", 1))  # it went on meanwhile


def test_what_was_saved_in_the_background_is_gone_on_from_to_the_same_bits(foreground: Trained, tmp_path: Path) -> None:
    train_on_disk(config(tmp_path, background=True, steps=3), seconds=0.02)
    resumed = trained(config(tmp_path, background=True))
    assert [row["step"] for row in resumed.rows] == [*range(1, STEPS + 1)]
    assert states(tmp_path) == states(foreground.run_dir)


@pytest.mark.parametrize("background", [False, True])
def test_a_model_that_all_ranks_write_is_the_same_model(foreground: Trained, tmp_path: Path, background: bool) -> None:
    trained(config(tmp_path / "run", background=background, steps=3, split=True))
    done = trained(config(tmp_path / "run", background=background, split=True))  # goes on from what was saved so
    files = [load_file(file) for file in sorted(done.checkpoint(STEPS).glob("model*.safetensors"))]
    assert len(files) == 2
    assert all(any(".weight" in name for name in held) for held in files)
    assert "norm.running_mean" in files[0]  # each rank has its own; that of rank 0 is the one that is kept
    whole = foreground.model(STEPS)
    assert same_tensors({**files[0], **files[1]}, whole) == []
    assert sum(map(len, files)) == len(whole)
    others, wanted = (
        {name: raw for name, raw in states(run_dir).items() if "/model" not in name}
        for run_dir in (done.run_dir, foreground.run_dir)
    )
    assert others == wanted
    reshard(done.checkpoint(STEPS), tmp_path / "of-one", 1)
    assert inspect(tmp_path / "of-one", verify=True)["problems"] == []


def test_groups_of_which_ranks_hold_parts_are_saved_in_the_background_too(tmp_path: Path) -> None:
    saved = []
    for background in (False, True):
        checkpoint = {"every": 2, "keep": 100, "async": background}
        done = trained(moe(tmp_path / str(background), 1, 2, steps=4, checkpoint=checkpoint))
        saved.append(states(done.run_dir))
    assert saved[0] == saved[1]
    assert sum("model-" in name for name in saved[0]) == 3 * 2  # of steps 1, 2 and 4, a file from each rank


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    done = train_on_disk(config(tmp_path, background=True, steps=4), seconds=0.1)
    told = order(done)
    for step in (1, 2, 3, 4):
        assert told.index(("checkpoint", step)) > told.index(("step", step))
    # The save of step 2 begins once that of step 1 is published, and only then there is a third window.
    assert told.index(("checkpoint", 1)) < told.index(("step", 3))
    assert told.index(("checkpoint", 2)) < told.index(("step", 4))


def test_a_stop_settles_what_is_under_way_and_then_saves(tmp_path: Path) -> None:
    done = train_on_disk(config(tmp_path, background=True, every=2), seconds=0.2, stop_at=3)
    assert done.codes == [75, 75], done.errors
    assert [(e["event"], e["step"]) for e in done.events if e["event"] in ("checkpoint", "stopped")] == [
        ("checkpoint", 1),
        ("checkpoint", 2),
        ("checkpoint", 3),
        ("stopped", 3),
    ]


@pytest.mark.parametrize(("rank", "call"), [(1, "write"), (1, "fsync"), (0, "create")])
def test_a_failed_save_ends_the_run_as_it_does_in_the_foreground(tmp_path: Path, rank: int, call: str) -> None:
    for background in (False, True):
        run_dir = tmp_path / str(background)
        done = train_on_disk(config(run_dir, background=background), rank=rank, fails=call, at_step=3)
        assert done.codes == [3, 3]
        told = f"CheckpointError: {{}}{run_dir}/checkpoints: cannot save: {os.strerror(errno.EIO)}"
        assert done.errors[rank].startswith(told.format(""))
        assert done.errors[1 - rank].startswith(told.format(f"rank {rank}: "))
        assert [found.step for found in scan(run_dir) if found.complete] == [2, 1]
        assert len(states(run_dir)) == 2 * 5  # nothing half written is left


def test_an_error_that_all_ranks_share_loses_no_save_under_way(tmp_path: Path) -> None:
    """A loss that is not finite ends the run; what was written meanwhile is published first."""
    in_fourth_window = 13
    done = train_on_disk(config(tmp_path, background=True, every=3, nan=in_fourth_window), seconds=0.3)
    assert done.codes == [6, 6], done.errors
    assert [found.step for found in scan(tmp_path) if found.complete] == [3, 1]


def test_a_rank_that_fails_alone_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    in_fourth_window_of_rank_1 = 15
    done = train_on_disk(config(tmp_path, background=True, every=3, bad=in_fourth_window_of_rank_1), seconds=0.3)
    assert 0 not in done.codes
    assert "on purpose" in done.errors[1]
    found = newest(tmp_path)
    assert found is not None
    assert found.step in (1, 3)
    assert inspect(found.path, verify=True)["problems"] == []
