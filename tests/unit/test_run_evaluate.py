"""What a validation leaves as it was, and which losses count."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

from shardrun.comm.communicator import Communicator
from shardrun.config.load import from_mapping
from shardrun.data.seeding import rng_states
from shardrun.errors import UsageError
from shardrun.run.build import Built, build
from shardrun.run.evaluate import evaluate, training_aside
from shardrun.run.forward import Tally
from tests.support.training import RECIPES, document


class Merging(nn.Module):
    """Does more in `train` than to set the flag, as adapters that merge their weights for inference do."""

    merged = False

    def train(self, mode: bool = True) -> Self:
        self.merged = not mode
        return super().train(mode)


def _mixed() -> tuple[nn.Module, Merging, Merging]:
    norm, inner, outer = nn.BatchNorm1d(2).eval(), Merging(), Merging().eval()
    middle = nn.Sequential(nn.Dropout(), inner)
    middle.training = False  # itself, not what is in it
    return nn.Sequential(norm, middle, outer), inner, outer


@pytest.mark.parametrize("fails", [False, True])
def test_every_module_gets_its_own_mode_back_and_every_stream_its_place(fails: bool) -> None:
    model, inner, outer = _mixed()
    modes, streams = [module.training for module in model.modules()], rng_states()
    with pytest.raises(ValueError) if fails else training_aside(nn.Identity()), training_aside(model):
        assert not any(module.training for module in model.modules())
        assert inner.merged
        torch.rand(3)
        if fails:
            raise ValueError("no")
    assert [module.training for module in model.modules()] == modes == [True, False, False, True, True, False]
    assert (inner.merged, outer.merged) == (False, True)
    assert all(torch.equal(state, streams[name]) for name, state in rng_states().items())


def _built(folder: Path, section: dict[str, Any], **args: Any) -> Built:
    sections = {"train": {"micro_batch_size": 2, "global_batch_size": 2}, "eval": section}
    return build(
        from_mapping(document(folder, 1, sections, str(RECIPES / "run_net.py"), **args)), Communicator.single()
    )


def test_the_val_split_is_built_with_everything_else_where_it_is_asked_for(tmp_path: Path) -> None:
    for section in ({"at_end": True}, {"at_end": False, "every": 3}):
        with pytest.raises(FileNotFoundError, match=r"val\.bin"):
            _built(tmp_path, section, val=False)
    assert _built(tmp_path, {"at_end": False}, val=False).val_loader is None


def test_a_val_split_without_samples_is_named(tmp_path: Path) -> None:
    config = document(tmp_path, 1, {"eval": {"at_end": True}}, samples=[[1.0]], val=[])
    with pytest.raises(UsageError, match=r"val split \(eval.every, eval.at_end\): data set list is empty"):
        build(from_mapping(config), Communicator.single())


def test_a_validation_says_whether_somebody_asked_to_stop(tmp_path: Path) -> None:
    built = _built(tmp_path, {"at_end": True, "max_samples": 3})
    found = evaluate(built)
    assert (found.tokens, found.stopping) == (3, False)
    assert evaluate(built, lambda: True).stopping


@pytest.mark.parametrize("weigh", [int, torch.tensor, lambda count: torch.tensor(count, dtype=torch.uint8)])
def test_the_loss_of_a_micro_batch_without_weight_does_not_count(weigh: Any) -> None:
    tally = Tally()
    for loss, weight in ((math.nan, 0), (2.0, 200), (math.inf, 0), (1.5, 100)):
        tally.add(torch.tensor(loss), weigh(weight))
    assert (float(tally.loss), int(tally.weight)) == (3.5, 300)
    tally.add(torch.tensor(math.nan), weigh(1))
    assert math.isnan(float(tally.loss))


def test_what_the_recipe_left_in_eval_mode_is_said(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from tests.support.recipes.run_net import Args, build_data, loss\n"
        "from tests.support.recipes import run_net\n\n"
        "def build_model(args, world):\n    return run_net.build_model(args, world).eval()\n"
    )
    config = document(tmp_path, 1, {"precision": {"parameters": "bf16"}}, str(recipe))
    built = build(from_mapping(config), Communicator.single())
    assert not built.model.training
    assert any("left the model in eval mode" in note for note in built.notes)
    assert "parameters of 1 norms with running statistics keep their format, as the buffers do" in built.notes


def test_options_for_one_name_of_a_tied_parameter_hold_for_it(tmp_path: Path) -> None:
    options = [{"match": ["head.*"], "weight_decay": 0.0}]
    sections = {"optimizer": {"name": "adamw", "lr": 0.1, "options": options}}
    config = document(tmp_path, 1, sections, str(RECIPES / "run_net.py"))
    built = build(from_mapping(config), Communicator.single())
    held = {
        placed.path: space.option_group
        for space in built.groups[0].sharded.layout.spaces
        for placed in space.parameters
    }
    assert held == {"embed.weight": 1, **dict.fromkeys(("norm_a.weight", "norm_a.bias", "out.weight", "out.bias"), 0)}


def test_a_loss_is_a_tensor_on_the_device_until_the_window_is_over() -> None:
    tally = Tally()
    tally.add(torch.tensor(1.0, requires_grad=True), torch.tensor(2))
    assert isinstance(tally.loss, Tensor)
    assert not tally.loss.requires_grad
    assert tally.loss.dtype == torch.float64
