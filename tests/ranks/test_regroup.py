"""Checkpoints taken up by other replica sets: what each rank picks, and what would be lost without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardrun.checkpoint.manifest import read_manifest
from tests.golden.runs import flip
from tests.ranks.test_groups_train import _ADAMW, moe
from tests.support.launching import ROOT
from tests.support.training import train, trained

pytestmark = pytest.mark.sample(2)
_MOE = f"""
import sys
sys.path.insert(0, {str(ROOT / "recipes")!r})
import torch
import moe
from moe import Args, build_data, loss

def build_model(args, world):
    model = moe.build_model(args, world)
    for module in model.modules():
        if isinstance(module, moe.Moe):
            for number, expert in module.experts.items():
                with_buffers(expert, float(number))
    return model

def with_buffers(expert, number):
    expert.register_buffer("kept", torch.tensor(number))
    expert.register_buffer("own", torch.tensor(number), persistent=False)
"""
_READ = """
def loss(model, batch):
    for path, buffer in model.named_buffers():
        assert float(buffer) == float(path.split(".")[4]) + 1.0, (path, buffer)
    return moe.loss(model, batch)
"""


def test_parts_that_made_other_numbers_of_updates_are_joined(tmp_path: Path) -> None:
    """Experts of one rank that no token reached in a window are an update behind those of the other."""
    few = {"experts": 8, "top_k": 1, "context": 1, "layers": 1, "balance": 0.0}
    tiny = {"steps": 8, "micro_batch_size": 1, "global_batch_size": 2}
    done = trained(moe(tmp_path, 1, 2, recipe_args=few, train=tiny), stop_at=7)
    records = [entry for entry in read_manifest(done.checkpoint(7))[0]["files"] if entry["role"] == "record"]
    counts = {entry["group"]: entry["meta"]["step_count"] for entry in records}
    assert counts["experts-0"] != counts["experts-1"]
    assert trained(moe(tmp_path, 2, 1, recipe_args=few, train=tiny), reshard=True).steps[-1]["step"] == 8


def test_buffers_go_with_their_experts(tmp_path: Path) -> None:
    recipe = tmp_path / "buffers.py"
    recipe.write_text(_MOE.replace("with_buffers(expert, float(number))", "with_buffers(expert, float(number) + 1.0)"))
    trained({**moe(tmp_path, 1, 2, steps=2), "recipe": str(recipe)}, stop_at=1)
    recipe.write_text(_MOE + _READ)  # builds them otherwise: what is read there was saved
    elsewhere = {**moe(tmp_path, 2, 1, steps=2), "recipe": str(recipe)}
    assert trained(elsewhere, reshard=True, accept_changes=True).steps[-1]["step"] == 2


def test_an_older_checkpoint_is_regrouped_where_the_newest_is_damaged(tmp_path: Path) -> None:
    """As by a resume on the same ranks: only if that was asked for."""
    done = trained(moe(tmp_path, 1, 2, steps=3, checkpoint={"every": 1}), stop_at=2)
    file = next(done.checkpoint(2).glob("zero2/experts-1/rank-00000-*"))
    flip(file, 8 * file.stat().st_size - 3)
    elsewhere = moe(tmp_path, 2, 1, steps=3)
    refused = train(elsewhere, reshard=True)
    assert set(refused.codes) == {3}
    assert "its content was changed" in refused.errors[0]
    taken = trained(elsewhere, reshard=True, allow_fallback=True)
    assert [row["step"] for row in taken.steps] == [1, 2, 3]
    assert any("step-0000000001 was regrouped" in note for note in taken.texts("note"))


@pytest.mark.parametrize(
    ("args", "groups", "said"),
    [
        ({"tied": True}, {}, "head.weight: saved as a tensor of its own, this run tied to embed.weight"),
        (
            {},
            {"dense": {"select": {"exclude": ["*.experts.*", "norm.weight"]}, "optimizer": _ADAMW}},
            "norm.weight: the checkpoint trains it, this run does not",
        ),
        ({"layers": 1}, {}, "model: blocks.1.attn.out.weight is in the checkpoint, no rank of this run has it"),
    ],
)
def test_what_would_be_lost_is_refused(tmp_path: Path, args: dict[str, Any], groups: dict[str, Any], said: str) -> None:
    trained(moe(tmp_path, 1, 2, steps=2, recipe_args={"tied": False}), stop_at=1)
    other = moe(tmp_path, 2, 1, steps=2, recipe_args={"tied": False, **args})
    other["groups"] |= groups
    refused = train(other, reshard=True, accept_changes=True)
    assert set(refused.codes) == {3}
    assert said in refused.errors[0]
