"""Parts of a model that differ from rank to rank and that nothing trains: compared, saved and taken up all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.ranks.test_groups_train import _ADAMW, model, moe
from tests.support.training import document, train, trained

pytestmark = pytest.mark.sample(2)
_DENSE: dict[str, Any] = {"select": {"exclude": ["*.experts.*"]}, "optimizer": _ADAMW}
_DOWN: dict[str, Any] = {"select": {"include": ["*.experts.*.down.*"]}, "replicas": "experts", "optimizer": _ADAMW}


def frozen(folder: Path, replicas: int, experts: int, groups: dict[str, Any], steps: int = 2) -> dict[str, Any]:
    """Experts of which nothing is trained, or only some matrices; replicas are compared before each step."""
    config = {**moe(folder, replicas, experts, steps), "groups": groups}
    config["train"]["check_replicas_every"] = 1
    return config


@pytest.mark.parametrize("groups", [{"dense": _DENSE}, {"dense": _DENSE, "experts": _DOWN}])
def test_frozen_experts_are_saved_by_the_ranks_that_have_them(tmp_path: Path, groups: dict[str, Any]) -> None:
    alone = trained(frozen(tmp_path / "alone", 1, 1, groups))
    straight = trained(frozen(tmp_path / "straight", 1, 2, groups))
    trained(frozen(tmp_path / "resumed", 1, 2, groups), stop_at=1)
    resumed = trained(frozen(tmp_path / "resumed", 1, 2, groups))
    held, twin, other = model(resumed, 2), model(straight, 2), model(alone, 2)
    assert held.keys() == twin.keys() == other.keys()
    assert all(torch.equal(tensor, twin[name]) for name, tensor in held.items())
    untrained = [name for name in held if ".experts." in name and (".down." not in name or len(groups) == 1)]
    assert untrained
    assert all(torch.equal(held[name], other[name]) for name in untrained)


@pytest.mark.parametrize("groups", [{"dense": _DENSE}, {"dense": _DENSE, "experts": _DOWN}])
def test_frozen_experts_move_to_other_ranks(tmp_path: Path, groups: dict[str, Any]) -> None:
    done = trained(frozen(tmp_path, 1, 2, groups, steps=3), stop_at=1)
    moved = trained(frozen(tmp_path, 2, 1, groups, steps=3), reshard=True, stop_at=2)
    assert model(moved, 2).keys() == model(done, 1).keys()
    back = trained(frozen(tmp_path, 1, 1, groups, steps=3), reshard=True)
    assert back.steps[-1]["step"] == 3


def test_a_model_in_parts_starts_from_a_file_of_the_whole(tmp_path: Path) -> None:
    """Each rank takes what it has; what no rank has is refused."""
    groups = {"dense": _DENSE, "experts": _DOWN}
    before = trained(frozen(tmp_path / "before", 1, 1, groups, steps=1))
    file = tmp_path / "whole.safetensors"
    save_file(model(before, 1), file)
    start = {"init_from": str(file)}
    alone, apart = (trained({**frozen(tmp_path / str(n), 1, n, groups, steps=1), **start}) for n in (1, 2))
    assert apart.steps[0]["loss"] == pytest.approx(alone.steps[0]["loss"], rel=1e-6)
    assert apart.steps[0]["loss"] != before.steps[0]["loss"]
    save_file({**model(before, 1), "blocks.9.more": torch.zeros(1)}, file)
    refused = train({**frozen(tmp_path / "refused", 1, 2, groups, steps=1), **start})
    assert all("blocks.9.more: in the file, not in the model" in error for error in refused.errors)


_BY_RANK = """
import torch, pydantic
class Args(pydantic.BaseModel): pass
def build_model(args, world):
    part = torch.nn.Linear(1, 1)
    part.register_buffer("number", torch.tensor(world.rank))
    return torch.nn.ModuleDict({f"part{world.rank}": part})
def build_data(args, split): return [torch.ones(1)] * 4
def loss(model, batch): return sum(part(batch).sum() for part in model.values()), len(batch)
"""


def test_buffers_of_parts_that_lists_of_ranks_tell_apart(tmp_path: Path) -> None:
    """Without an axis, too, a rank may have buffers that no other has."""
    recipe = tmp_path / "by_rank.py"
    recipe.write_text(_BY_RANK)
    parts = {"parts": {"replicas": [[0], [1]], "optimizer": _ADAMW}}
    config = document(tmp_path, 2, {"groups": parts, "train": {"steps": 2}}, str(recipe))
    del config["optimizer"]
    trained(config, stop_at=1)
    assert [row["step"] for row in trained(config).steps] == [1, 2]


def test_a_frozen_expert_that_changes_on_one_of_its_ranks_is_found(tmp_path: Path) -> None:
    path = "blocks.0.moe.experts.2.up.weight"
    config = frozen(tmp_path, 2, 2, {"dense": _DENSE})
    done = train(config, fault=f"lie rank 3 about parameter {path} at forward of step 2")
    assert set(done.codes) == {1}
    assert all(f"because {path} is not the same on all ranks: rank 1 and rank 3 differ" in e for e in done.errors)
