"""Public bug reports about state that is missing, empty, prefixed or not sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardrun.checkpoint.reshard import reshard
from tests.support.training import RECIPES, Trained, document, train, trained

_GATE = str(RECIPES / "train_gate.py")


def _gated(run_dir: Path, world_size: int, steps: int = 3, **recipe_args: Any) -> dict[str, Any]:
    sections = {
        "optimizer": {"name": "adamw", "lr": 0.1},
        "train": {"steps": steps, "micro_batch_size": 1, "global_batch_size": 4},
        "checkpoint": {"every": 1, "keep": 9},
    }
    return document(run_dir, world_size, sections, _GATE, **recipe_args)


def _same(left: Trained, right: Trained, step: int) -> bool:
    pairs = [(left.model(step), right.model(step)), (left.state(step), right.state(step))]
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)


def test_c052_a_parameter_without_a_gradient_so_far_is_saved_and_starts_at_step_0(tmp_path: Path) -> None:
    straight = trained(_gated(tmp_path / "straight", 2))
    first = trained(_gated(tmp_path / "broken", 2), stop_at=1)
    assert first.state(1)["gate/step"] == 0
    assert first.state(1)["weight/step"] == 1
    assert any("gate has no gradient on any rank" in text for text in first.texts("note"))
    broken = trained(_gated(tmp_path / "broken", 2))
    assert broken.state(3)["gate/step"] == 1
    assert broken.state(3)["weight/step"] == 3
    assert torch.equal(first.model(1)["gate"], torch.tensor(0.5))
    assert _same(straight, broken, 3)


def test_c070_ranks_with_empty_shares_train_save_and_resume(tmp_path: Path) -> None:
    straight = trained(_gated(tmp_path / "straight", 4))
    trained(_gated(tmp_path / "broken", 4), stop_at=2)
    broken = trained(_gated(tmp_path / "broken", 4))
    assert _same(straight, broken, 3)


def test_c070_two_elements_go_from_one_rank_to_four_to_two(tmp_path: Path) -> None:
    begun = trained(_gated(tmp_path / "run", 1), stop_at=1)
    at = begun.checkpoint(1)
    for world_size in (4, 2, 1):
        at = reshard(at, tmp_path / str(world_size), world_size).path
    record = "zero2/default/rank-00000-of-00001.safetensors"
    assert (at / record).read_bytes() == (begun.checkpoint(1) / record).read_bytes()
    trained(_gated(tmp_path / "run", 4), stop_at=2, reshard=True)
    done = trained(_gated(tmp_path / "run", 2), reshard=True)
    straight = trained(_gated(tmp_path / "straight", 2))
    assert _same(straight, done, 3)  # sums of whole numbers: no order of adding changes a bit


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_c085_a_compiled_model_has_the_names_of_the_plain_one(tmp_path: Path) -> None:
    for first, then in ((True, False), (False, True)):
        run_dir = tmp_path / f"{first}"
        begun = trained(_gated(run_dir, 1, compiled=first), stop_at=1)
        assert sorted(begun.model(1)) == ["gate", "weight"]
        trained(_gated(run_dir, 1, compiled=then), accept_changes=True)
    plain = trained(_gated(tmp_path / "plain", 1, compiled=False))
    assert torch.equal(
        plain.model(3)["weight"], trained(_gated(tmp_path / "True", 1, compiled=False)).model(3)["weight"]
    )


def test_c133_state_of_the_selection_is_halved_at_two_ranks_and_none_is_held_for_the_rest(tmp_path: Path) -> None:
    def bytes_per_rank(world_size: int, include: list[str]) -> tuple[list[int], Trained]:
        sections = {
            "optimizer": {"name": "adamw", "lr": 0.1},
            "select": {"include": include},
            "train": {"steps": 1, "micro_batch_size": 1, "global_batch_size": 2},
        }
        args = {"layers": 2, "width": 32, "heads": 2, "context": 16, "text": str(tmp_path / "text.txt")}
        recipe = str(RECIPES.parents[2] / "recipes" / "gpt.py")
        done = trained(document(tmp_path / f"{world_size}-{len(include)}", world_size, sections, recipe, **args))
        tables = next(event["tables"] for event in done.events if event["event"] == "start")
        memory = next(table for table in tables if table["title"] == "memory")
        column = memory["columns"].index("optimizer state")
        return [int(row[column].replace(",", "")) for row in memory["rows"]], done

    (tmp_path / "text.txt").write_text("to be, or not to be, that is the question. " * 60)
    (alone,), _ = bytes_per_rank(1, ["*"])
    halves, _ = bytes_per_rank(2, ["*"])
    padding = 2 * 2 * 256 * 4  # two moments, at most one block of 256 in each of two option groups
    assert all(abs(half - alone / 2) <= padding for half in halves)
    (subset,), done = bytes_per_rank(1, ["blocks.1.*", "norm.weight"])
    held = {name.rpartition("/")[0] for name in done.state(1)}
    assert all(name.startswith("blocks.1.") or name == "norm.weight" for name in held)
    assert subset < alone / 1.5


def test_a_micro_batch_that_no_trained_parameter_took_part_in_counts_as_zeros(tmp_path: Path) -> None:
    config = _gated(tmp_path, 1, steps=4)
    config["select"] = {"include": ["gate"]}
    done = trained(config)
    assert [row["updates"] for row in done.steps] == [0, 0, 1, 2]
    assert [row["skipped"] for row in done.steps] == ["no gradient", "no gradient", None, None]
    assert done.state(4)["gate/step"] == 2
    assert torch.equal(done.model(2)["gate"], torch.tensor(0.5))
    assert torch.equal(done.model(4)["weight"], torch.tensor([1.0, 2.0]))


def test_a_run_without_one_update_has_failed(tmp_path: Path) -> None:
    config = _gated(tmp_path, 2, steps=2)  # the gate gets its first gradient at the third window
    config["select"] = {"include": ["gate"]}
    done = train(config)
    assert done.codes == [1, 1]
    assert all("no update was made in 2 windows" in error for error in done.errors)


def test_a_run_that_diverged_does_not_skip_for_ever(tmp_path: Path) -> None:
    samples: list[list[float]] = [[1.0], *[[3e38, 3e38]] * 60]
    sections = {"train": {"steps": 61, "global_batch_size": 1, "nonfinite": "skip"}, "checkpoint": {"every": 1}}
    done = train(document(tmp_path, 1, sections, samples=samples))
    assert done.codes == [6]
    assert done.steps[-1]["step"] == 51
    assert "window 51 is skipped" in done.texts("note")[-1]


@pytest.mark.parametrize("background", [False, True])
def test_a_buffer_that_grows_in_forward_is_refused_at_the_first_save(tmp_path: Path, background: bool) -> None:
    recipe = str(RECIPES / "run_grows.py")
    sections = {"train": {"steps": 2, "global_batch_size": 2}, "checkpoint": {"async": background}}
    grown = train(document(tmp_path / "grown", 2, sections, recipe))
    assert grown.codes == [3, 3]
    assert all("cache: (0,) torch.float32 at set-up, (8,) torch.float32 now" in error for error in grown.errors)
    assert not grown.checkpoint(1).exists()
    trained(document(tmp_path / "full", 2, sections, recipe, full=True), stop_at=1)
    trained(document(tmp_path / "full", 2, sections, recipe, full=True))
