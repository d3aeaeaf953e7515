"""A replica that is silently changed: found at the next comparison, before anything is spread or saved (fault 32)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shardrun.checkpoint.store import scan
from tests.support.launching import shardrun, started, write_config
from tests.support.training import RECIPES, Trained, document, train

pytestmark = pytest.mark.sample(8)

LAYERS = str(RECIPES / "train_two_layers.py")
FIRST, SECOND = "l1", "l2"


def run(folder: Path, world_size: int, strategy: str = "zero2", sections: Any = None, **options: Any) -> Trained:
    base: dict[str, Any] = {
        "optimizer": {"name": "adamw", "lr": 0.1, "strategy": strategy},
        "train": {"steps": 6, "micro_batch_size": 1, "global_batch_size": world_size},
        "checkpoint": {"every": 2, "keep": 9},
    }
    for name, section in (sections or {}).items():
        base[name] = {**base.get(name, {}), **section}
    return train(document(folder, world_size, base, LAYERS), **options)


def saved(done: Trained) -> list[int]:
    return sorted(one.step for one in scan(done.run_dir) if one.complete)


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@pytest.mark.parametrize("path", [FIRST, SECOND])
@pytest.mark.parametrize("place", ["idle of step 1", "save of step 1"])
def test_a_flipped_bit_is_found_before_it_is_saved(tmp_path: Path, place: str, path: str, strategy: str) -> None:
    done = run(tmp_path, 2, strategy, fault=f"lie rank 1 about parameter {path} at {place}")
    told = (
        f"DivergenceError: step 1 is not saved, because {path} is not the same on all ranks: rank 0 and rank 1 differ, "
        "and nobody can say who is right. Nothing of it is saved"
    )
    assert done.codes == [1, 1]
    assert all(error.startswith(told) for error in done.errors), done.errors
    assert done.places == [(1, "save")] * 2
    assert saved(done) == []


@pytest.mark.parametrize(("rank", "others"), [(0, "ranks 1,2"), (2, "ranks 0,1")])
def test_of_three_the_odd_one_is_named(tmp_path: Path, rank: int, others: str) -> None:
    done = run(tmp_path, 3, fault=f"lie rank {rank} about parameter {SECOND} at save of step 2")
    assert done.codes == [1] * 3
    assert all(f"{SECOND} is not the same on all ranks: rank {rank} differs from {others}, who agree" in error
               for error in done.errors)  # fmt: skip
    assert saved(done) == [1]


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@pytest.mark.parametrize("path", [FIRST, SECOND])
@pytest.mark.parametrize("place", ["data of step 4", "forward of step 4", "backward of step 4"])
def test_a_comparison_before_every_update_finds_it_before_it_is_spread(
    tmp_path: Path, place: str, path: str, strategy: str
) -> None:
    often = {"train": {"check_replicas_every": 1}}
    done = run(tmp_path, 2, strategy, often, fault=f"lie rank 0 about parameter {path} at {place}")
    assert done.codes == [1, 1]
    told = f"DivergenceError: step 4 is not made, because {path} is not the same on all ranks: "
    assert all(error.startswith(told) for error in done.errors), done.errors
    assert done.places == [(4, "replicas")] * 2
    assert [row["step"] for row in done.steps] == [1, 2, 3]
    assert saved(done) == [1, 2]


def test_the_same_command_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    often = {"train": {"check_replicas_every": 2}}
    run(tmp_path / "lied", 2, sections=often, fault=f"lie rank 1 about parameter {FIRST} at forward of step 4")
    again, straight = run(tmp_path / "lied", 2), run(tmp_path / "straight", 2)
    assert again.codes == straight.codes == [0, 0]
    assert again.steps == straight.steps
    assert all(torch.equal(again.model(6)[name], straight.model(6)[name]) for name in (FIRST, SECOND))


def test_how_often_is_asked_and_what_is_not_due_goes_by(tmp_path: Path) -> None:
    """A trained parameter is overwritten by its owner's, or spread, by the next step; a frozen one stays as it is."""
    rare = {"train": {"check_replicas_every": 5}, "checkpoint": {"every": 6}, "select": {"include": [FIRST]}}
    place = "forward of step 3"
    trained = run(tmp_path / "a", 2, sections=rare, fault=f"lie rank 1 about parameter {FIRST} at {place}")
    assert trained.codes == [0, 0]
    frozen = run(tmp_path / "b", 2, sections=rare, fault=f"lie rank 1 about parameter {SECOND} at {place}")
    assert frozen.codes == [1, 1]
    assert "step 5 is not made, because l2 is not the same" in frozen.errors[0]


def test_what_changes_while_it_is_written_is_not_gone_on_from(tmp_path: Path) -> None:
    """The ranks have agreed on the digest by then, and the hash of the file is that of what was written."""
    stopped = run(tmp_path, 2, fault=f"lie rank 0 about parameter {SECOND} at save:8 of step 2", stop_at=2)
    assert stopped.codes == [75, 75]
    again = run(tmp_path, 2)
    assert again.codes == [3, 3]
    assert "checkpoint step-0000000002 does not fit: its parameters (digest " in again.errors[0]
    assert "are not those that the ranks agreed on when it was saved" in again.errors[0]
    older = run(tmp_path, 2, resume_from=str(stopped.checkpoint(1)))
    assert older.codes == [0, 0]


def test_the_screen_names_tensor_ranks_and_the_last_good_checkpoint(tmp_path: Path) -> None:
    config = write_config(tmp_path, checkpoint={"every": 1}, topology={"world_size": 3}, train={"global_batch_size": 6})
    fault = "lie rank 1 about parameter linear.bias at save of step 3"
    with started(shardrun("train", config, "--fault", fault), tmp_path) as program:
        assert program.wait(120) == 1
    assert program.stderr.splitlines()[:3] == [
        "all ranks stopped at step 3, phase save",
        "  step 3 is not saved, because linear.bias is not the same on all ranks: rank 1 differs from ranks 0,2, who "
        "agree. Nothing of it is saved; look for faulty memory, and for a recipe that writes to parameters on its own",
        program.stderr.splitlines()[2],
    ]
    assert re.search(r"^ranks \d, \d: the same error$", program.stderr, re.MULTILINE)
    assert f"last checkpoint: {tmp_path}/run/checkpoints/step-0000000002" in program.stderr.splitlines()
    assert program.stderr.splitlines()[-1] == "exit code 1 (training failed)"
