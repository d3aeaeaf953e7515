"""What goes on between the steps changes nothing of the training: hooks, validation, stops, and what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.training import RECIPES, Trained, document, trained

NET = RECIPES / "verify_net.py"
SECTIONS: dict[str, Any] = {
    "optimizer": {"name": "sgd", "lr": 0.1},
    "train": {"steps": 4, "micro_batch_size": 2, "global_batch_size": 4},
    "eval": {"every": 1},
    "checkpoint": {"every": 1},
}
MEDDLING = """
import random
import torch


def meddle():
    random.random(), np.random.random(), torch.rand(3)
    torch.set_grad_enabled(False)


def on_save(model, folder):
    meddle()
    assert not torch.is_grad_enabled()
    model.second.train(False)
    model.eval()
    (folder / "saved.txt").write_text(folder.parent.name)


def metrics(loss, weight):
    meddle()
    return {"twice": 2 * loss}
"""


def recipe(folder: Path, more: str, base: Path = NET) -> str:
    """A recipe in `folder`: that of `base` with `more` behind it."""
    path = folder / "recipe.py"
    path.write_text(base.read_text() + more)
    return str(path)


def training_rows(done: Trained) -> list[dict[str, Any]]:
    return [{key: row[key] for key in ("step", "loss", "grad_norm")} for row in done.steps]


def test_hooks_of_a_recipe_leave_the_training_as_it_was(tmp_path: Path) -> None:
    plain = trained(document(tmp_path / "plain", 1, SECTIONS, str(NET)))
    hooked = trained(document(tmp_path / "hooked", 1, SECTIONS, recipe(tmp_path, MEDDLING)))
    assert training_rows(hooked) == training_rows(plain)
    assert all("twice" in row for row in hooked.rows if "val_loss" in row)


def test_exports_appear_whole_and_go_with_their_checkpoints(tmp_path: Path) -> None:
    exports, source = tmp_path / "run" / "exports", recipe(tmp_path, MEDDLING)
    (exports / ".part-step-0000000001").mkdir(parents=True)  # of a start that was killed
    (exports / "mine").mkdir()
    trained(document(tmp_path / "run", 1, SECTIONS, source))
    assert sorted(path.name for path in exports.iterdir()) == ["mine", "step-0000000003", "step-0000000004"]
    assert (exports / "step-0000000004" / "saved.txt").read_text() == "exports"
