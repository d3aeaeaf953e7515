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


def test_items_do_not_depend_on_the_workers_where_a_rank_has_threads(tmp_path: Path) -> None:
    more = """

class Threads:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((7,), float(torch.get_num_threads())), torch.tensor(index % 3)


def build_data(args, split):
    return Threads()


def collate(samples):
    assert torch.get_num_threads() == 1
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
"""
    source, rows = recipe(tmp_path, more), []
    for workers in (0, 2):
        sections = {**SECTIONS, "data": {"workers": workers}, "topology": {"threads_per_rank": 2}}
        done = trained(document(tmp_path / f"run-{workers}", 1, sections, source))
        rows.append([{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_s")} for row in done.rows])
    assert rows[0] == rows[1]


def test_the_randomness_of_a_validation_does_not_depend_on_the_world_size(tmp_path: Path) -> None:
    samples, val = [[1.0]] * 4, [[float(i)] for i in range(40)]
    more = "\n\n_loss = loss\n\n\ndef loss(model, batch, world):\n"
    more += "    total, weight = _loss(model, batch, world)\n"
    more += "    return total + (0.0 if model.training else draw(1)[2] * 2.0**-10), weight\n"
    more += "\n\nfrom tests.support.recipes.toy import draw\n"
    found = []
    for world in (1, 2):
        sections = {**SECTIONS, "train": {"steps": 1, "micro_batch_size": 2, "global_batch_size": 4}}
        config = document(tmp_path / str(world), world, sections, recipe(tmp_path, more, RECIPES / "toy.py"),
                          samples=samples, val=val)  # fmt: skip
        found += [row["val_loss"] for row in trained(config).rows if "val_loss" in row]
    assert abs(found[0] - found[1]) < 1e-12, found
