"""The TOY recipe of the cases says what the cases say it does: a gradient that is the plain mean of x."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardrun.run.recipe import World, load_recipe

SOURCE = str(Path(__file__).parents[1] / "support" / "recipes" / "toy.py")


def gradients(args: dict[str, Any], world: World) -> tuple[float, float, int]:
    """Loss, d loss / d w and weight of all training samples as one micro-batch."""
    recipe = load_recipe(SOURCE, args)
    model = recipe.build_model(world)
    assert recipe.collate is not None
    loss_sum, weight = recipe.loss(model, recipe.collate(list(recipe.build_data("train"))), world)
    loss_sum.backward()  # type: ignore[no-untyped-call]
    gradient = model.get_parameter("w").grad
    assert gradient is not None
    return loss_sum.item(), gradient.item(), int(weight)


def test_gradient_is_the_sum_of_x_and_weight_the_number_of_tokens() -> None:
    assert gradients({"samples": [[6.0], [1.0, 2.0, 3.0]], "w": 2.0}, World(0, 2)) == (24.0, 12.0, 4)


def test_ignored_tokens_count_nowhere() -> None:
    assert gradients({"samples": [[4.0, None], [2.0]]}, World(0, 2)) == (0.0, 6.0, 2)
    assert gradients({"samples": [[None], [None]]}, World(0, 2)) == (0.0, 0.0, 0)


def test_each_rank_draws_its_own_count_and_writes_what_it_saw(tmp_path: Path) -> None:
    record = tmp_path / "seen"
    args = {"samples": [[3.0]], "noise": True, "record": str(record)}
    for rank in range(2):
        random.seed(rank)
        np.random.seed(rank)
        torch.manual_seed(rank)
        gradient = gradients(args, World(rank, 2))[1]
        line = json.loads(Path(f"{record}.rank-{rank}").read_text())
        assert line["x"] == [3.0]
        assert line["training"] is True
        assert len(line["draws"]) == 3 * (rank + 1)
        assert abs(gradient - 3.0 - sum(line["draws"])) < 1e-5
