"""What goes on between the steps changes nothing of the training: hooks, validation, stops, and what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.training import RECIPES, Trained, document, train, trained

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


# ---- stops ---------------------------------------------------------------------------------------------------------

STOPS = """

import os
import signal

_loss = loss


def loss(model, batch, world):
    marker = Path(__file__).with_name("stopped")
    if not marker.exists() and model.training == TRAINING and batch.tolist() == [4.0]:
        marker.touch()
        os.kill(os.getpid(), signal.SIGTERM)
    return _loss(model, batch, world)
"""


def timeless(done: Trained) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl in order, those of validations included, without times."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_s")} for row in done.rows]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("training", [True, False])
def test_a_stop_does_not_wait_for_a_validation_which_is_made_up_for(tmp_path: Path, training: bool, world: int) -> None:
    source = recipe(tmp_path, STOPS.replace("TRAINING", str(training)), RECIPES / "toy.py")
    given = {"samples": [[float(i + 1)] for i in range(8)], "val": [[float(i)] for i in range(40)]}
    sections = {
        "train": {"steps": 4, "global_batch_size": 2},
        "eval": {"every": 2 if training else 1, "at_end": True},
    }

    def config(name: str) -> dict[str, Any]:
        return document(tmp_path / name, world, sections, source, record=str(tmp_path / f"{name}-saw"), **given)

    first = train(config("broken"))
    assert set(first.codes) == {75}, first.errors
    assert not any("val_loss" in row for row in first.rows)
    step = 2 if training else 1
    assert first.rows[-1]["step"] == step
    assert first.checkpoint(step).is_dir()
    assert len(Path(tmp_path / "broken-saw.rank-0").read_text().splitlines()) < 20
    resumed, straight = trained(config("broken")), trained(config("straight"))
    assert timeless(resumed) == timeless(straight)
    assert sum("val_loss" in row for row in resumed.rows) == (2 if training else 4)
    assert resumed.model(4)["w"] == straight.model(4)["w"]


# ---- what is written -----------------------------------------------------------------------------------------------


def test_an_error_of_the_data_names_the_step_under_way_and_the_data(tmp_path: Path) -> None:
    more = """

class Broken:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 4:
            raise ValueError("no such sample")
        return [1.0]


def build_data(args, split):
    return Broken() if split == "train" else args.val
"""
    sections = {"train": {"steps": 4, "global_batch_size": 2}, "eval": {"every": 2}}
    config = document(tmp_path / "run", 1, sections, recipe(tmp_path, more, RECIPES / "toy.py"), samples=[[1.0]])
    done = train(config)
    assert "no such sample" in done.errors[0]
    assert done.places == [(3, "data")]


def test_a_branch_has_a_checkpoint_of_its_own_at_once(tmp_path: Path) -> None:
    sections = {"train": {"steps": 6}, "checkpoint": {"keep": 5}}
    parent = trained(document(tmp_path / "parent", 1, sections, samples=[[1.0]] * 6), stop_at=2)
    branch = document(tmp_path / "branch", 1, sections, samples=[[1.0]] * 6)
    done = trained(branch, stop_at=5, resume_from=str(parent.checkpoint(2)))
    assert sorted(path.name for path in (done.run_dir / "checkpoints").glob("step-*")) == [
        "step-0000000003",
        "step-0000000005",
    ]


def test_the_length_of_a_run_in_epochs_is_not_that_of_its_schedule(tmp_path: Path) -> None:
    sections = {
        "train": {"steps": None, "epochs": 2, "global_batch_size": 2},
        "schedule": {"name": "linear", "total_steps": 100},
    }
    done = trained(document(tmp_path / "run", 1, sections, samples=[[1.0]] * 5))
    totals = {event["total_steps"] for event in done.events if "total_steps" in event}
    assert (totals, done.steps[-1]["step"]) == ({6}, 6)


def test_an_abandoned_branch_leaves_the_rows_of_the_run(tmp_path: Path) -> None:
    sections = {"train": {"steps": 4}, "checkpoint": {"every": 2, "keep": 5}}
    samples = [[1.0], [2.0], [3.0], [4.0]]
    whole = trained(document(tmp_path / "run", 1, sections, samples=samples))
    before = whole.run_dir.joinpath("metrics.jsonl").read_bytes()
    source = recipe(tmp_path, "\n\ndef loss(model, batch, world):\n    raise ValueError('no')\n", RECIPES / "toy.py")
    given = {"resume_from": str(whole.checkpoint(2)), "accept_changes": True}
    failed = train(document(tmp_path / "run", 1, sections, source, samples=samples), **given)
    assert failed.codes != [0]
    assert "no" in failed.errors[0]
    assert whole.run_dir.joinpath("metrics.jsonl").read_bytes() == before


def test_metrics_that_cannot_be_written_cost_one_warning(tmp_path: Path) -> None:
    config = document(tmp_path / "run", 1, {"train": {"steps": 3}}, samples=[[1.0]] * 3)
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    done = train(config)
    assert done.codes == [0], done.errors
    assert [text for text in done.texts("warning") if "goes on without metrics" in text] == [
        f"{tmp_path}/run/metrics.jsonl: Is a directory; training goes on without metrics"
    ]
