"""A world of one, as a whole run: the bits of a loop of plain torch. tests/gpu has the same on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.plain_run import differing, differing_from_plain_torch, small_gpt
from tests.support.training import train, trained

_AGAIN = """
import torch
from recipes import gpt
from recipes.gpt import Args, build_data, build_model
def loss(model, batch):
    loss_sum, weight = gpt.loss(model, batch)
    aside, _ = gpt.loss(model, batch)
    loss_sum.register_hook(lambda grad: torch.autograd.backward(aside))
    return loss_sum, weight
"""


@pytest.mark.parametrize("precision", [{}, {"autocast": "bf16"}, {"matmul": "medium"}])
def test_a_run_of_one_rank_is_a_loop_of_plain_torch(tmp_path: Path, precision: dict[str, str]) -> None:
    assert differing_from_plain_torch(tmp_path, "gloo", "cpu", **precision) == []


def _twice(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A run in which every parameter gets a gradient from a backward, and another from one inside it."""
    recipe = folder / "again.py"
    recipe.write_text(_AGAIN)
    return {**small_gpt(folder, "gloo", **sections), "recipe": str(recipe)}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_that_arrives_twice_is_refused_with_the_way_out(tmp_path: Path, world_size: int) -> None:
    done = train(_twice(tmp_path, topology={"world_size": world_size}))
    assert set(done.codes) == {2}
    assert "got a gradient twice in one window" in done.errors[0]
    assert "train.stream_gradients: false in the config of a run" in done.errors[0]


def test_kept_gradients_that_arrive_twice_are_those_of_plain_torch(tmp_path: Path) -> None:
    assert differing(_twice(tmp_path, train={"stream_gradients": False}), "cpu") == []


def test_a_run_that_streamed_may_go_on_with_kept_gradients(tmp_path: Path) -> None:
    begun = small_gpt(tmp_path, "gloo")
    trained(begun, stop_at=2)
    assert differing({**begun, "train": {**begun["train"], "stream_gradients": False}}, "cpu") == []
