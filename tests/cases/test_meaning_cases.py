"""Going on from a checkpoint that was trained with something else: refused by the ranks that load it, or accepted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardrun.checkpoint.manifest import read_manifest, seal
from tests.support.training import RECIPES, Trained, document, train, trained

ADAMW = {"name": "adamw", "lr": 0.01, "betas": [0.9, 0.99]}
MOMENTUM = {"name": "sgd", "lr": 0.1, "momentum": 0.9}


def config(run_dir: Path, recipe: Path | None = None, **sections: Any) -> dict[str, Any]:
    """A run of four steps on two ranks that saves every step."""
    base = {"train": {"steps": 4, "global_batch_size": 2}, "checkpoint": {"every": 1, "keep": 4}}
    whole = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    return document(run_dir, 2, whole, str(recipe or RECIPES / "toy.py"), samples=[[1.0], [2.0], [0.5], [3.0]])


def refused(done: Trained, code: int) -> str:
    """The text with which all ranks refused alike; nothing was trained."""
    assert done.codes == [code, code], done.errors
    assert len(set(done.errors)) == 1
    assert done.rows == []
    return done.errors[0]


def write(manifest: dict[str, Any], path: Path) -> None:
    """Put a manifest that was changed in place of the one at `path`, with a seal that holds."""
    path.write_bytes(seal({key: value for key, value in manifest.items() if key != "digest"}))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"run": {"seed": 7}}, "run.seed: saved 0, now 7"),
        ({"train": {"max_grad_norm": 0.5}}, "train.max_grad_norm: saved null, now 0.5"),
        ({"train": {"global_batch_size": 4}}, "train.global_batch_size: saved 2, now 4"),
        ({"optimizer": {**ADAMW, "weight_decay": 0.5}}, "optimizer.weight_decay: saved 0.01, now 0.5"),
    ],
)
def test_another_checkpoint_holds_the_config_too(tmp_path: Path, change: dict[str, Any], line: str) -> None:
    """`resume_from` names a checkpoint of another folder: the one that is loaded counts, not the run's own folder."""
    source = trained(config(tmp_path / "one", optimizer=ADAMW), stop_at=2).checkpoint(2)
    sections: dict[str, Any] = {"optimizer": ADAMW, **change}
    other = config(tmp_path / "other", **sections)
    told = refused(train(other, resume_from=str(source)), 2)
    assert told == (
        f"UsageError: {source}: this run was trained with another config\n  {line}\n  "
        "go on with the change: --accept-changes; start anew in another folder: --fresh"
    )
    assert trained(other, resume_from=str(source), accept_changes=True).steps[0]["step"] == 3


def test_the_checkpoint_that_a_fallback_takes_holds_the_config(tmp_path: Path) -> None:
    run = trained(config(tmp_path / "run"), stop_at=2)
    (run.checkpoint(2) / "manifest.json").write_text("{")
    rows = len(run.rows)
    done = train(config(tmp_path / "run", run={"seed": 7}), allow_fallback=True)
    assert done.codes == [2, 2]
    assert "run.seed: saved 0, now 7" in done.errors[0]
    assert len(done.rows) == rows


def test_an_edited_recipe_is_refused_unless_it_is_accepted(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.py"
    shutil.copy(RECIPES / "toy.py", recipe)
    settings = config(tmp_path / "run", recipe)
    run = trained(settings, stop_at=2)
    saved = json.loads((run.checkpoint(2) / "manifest.json").read_text())["recipe"]["sha256"]
    recipe.write_text(recipe.read_text() + "\n# edited\n")
    done = train(settings)
    assert done.codes == [2, 2], done.errors
    assert f"recipe {recipe} was edited: sha256 saved {saved[:12]}, now " in done.errors[1]
    assert "--accept-changes" in done.errors[1]
    assert [row["step"] for row in done.steps] == [1, 2]
    accepted = trained(settings, accept_changes=True)
    assert any(f"recipe {recipe} was edited" in note for note in accepted.texts("note"))
    assert [row["step"] for row in accepted.steps] == [1, 2, 3, 4]


def test_the_processor_is_part_of_the_numerics(tmp_path: Path) -> None:
    settings = config(tmp_path / "run")
    path = trained(settings, stop_at=2).checkpoint(2) / "manifest.json"
    manifest, _ = read_manifest(path.parent)
    here = torch.backends.cpu.get_cpu_capability()
    assert manifest["numerics"]["processor"] == {"cpu": here}
    manifest["numerics"]["processor"]["cpu"] = "ABACUS"
    write(manifest, path)
    done = train(settings)
    assert done.codes == [3, 3]
    assert f"numerics.processor.cpu: saved 'ABACUS', this run '{here}'" in done.errors[0]
    assert "--accept-changes" in done.errors[0]
    assert [row["step"] for row in trained(settings, accept_changes=True).steps] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ADAMW, {**ADAMW, "weight_decay": 0.5}),
        (ADAMW, {**ADAMW, "betas": [0.8, 0.95], "eps": 1e-6}),
        (ADAMW, {**ADAMW, "fused": False}),
        (MOMENTUM, {**MOMENTUM, "momentum": 0.5, "nesterov": True}),
    ],
)
def test_options_that_leave_the_state_as_it_is_are_accepted(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    run = trained(config(tmp_path / "run", optimizer=before), stop_at=2)
    told = train(config(tmp_path / "run", optimizer=after))
    assert told.codes == [2, 2]
    done = trained(config(tmp_path / "run", optimizer=after), accept_changes=True)
    assert [row["step"] for row in done.steps] == [1, 2, 3, 4]
    # The saved state went in: what follows is what the new options make of it.
    assert float(done.model(4)["w"]) == pytest.approx(stepped(after, run, [1.5, 1.75]), rel=1e-5)
    # And the next start needs no flag.
    assert train(config(tmp_path / "run", optimizer=after)).codes == [0, 0]


def stepped(options: dict[str, Any], run: Trained, gradients: list[float]) -> float:
    """w after torch's own optimizer went on from step 2 of `run` over these gradients."""
    w = torch.nn.Parameter(run.model(2)["w"].clone())
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[options["name"]]
    optimizer = kind([w], **{key: value for key, value in options.items() if key not in ("name", "fused")})
    optimizer.state[w] = {name.removeprefix("w/"): tensor for name, tensor in run.state(2).items()}
    for gradient in gradients:
        w.grad = torch.full_like(w, gradient)
        optimizer.step()
    return float(w.detach())


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (ADAMW, {**ADAMW, "name": "adam"}, "optimizer.name: saved 'adamw', this run 'adam'"),
        (ADAMW, {**ADAMW, "amsgrad": True}, "amsgrad: saved False, this run True (the saved state has exp_avg, "),
        (MOMENTUM, {**MOMENTUM, "momentum": 0.0}, "(the saved state has momentum_buffer, this run needs none)"),
        ({**MOMENTUM, "momentum": 0.0}, MOMENTUM, "(the saved state has none, this run needs momentum_buffer)"),
    ],
)
def test_another_state_cannot_be_accepted(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], said: str
) -> None:
    run = trained(config(tmp_path / "run", optimizer=before), stop_at=2)
    done = train(config(tmp_path / "run", optimizer=after), accept_changes=True)
    assert done.codes == [3, 3], done.errors
    assert said in done.errors[0]
    assert "--accept-changes cannot turn one state into another" in done.errors[0]
    assert done.rows == run.rows


def test_masters_cannot_be_switched_off(tmp_path: Path) -> None:
    bf16 = {"parameters": "bf16"}
    trained(config(tmp_path / "run", optimizer=ADAMW, precision=bf16), stop_at=2)
    without = config(tmp_path / "run", optimizer=ADAMW, precision={**bf16, "master_weights": False})
    done = train(without, accept_changes=True)
    assert done.codes == [3, 3]
    assert "optimizer.masters: saved True, this run False" in done.errors[0]


@pytest.mark.parametrize("accept", [False, True])
@pytest.mark.parametrize("lost", ["meaning", "recipe"])
def test_a_manifest_without_a_meaning_is_no_checkpoint_of_ours(tmp_path: Path, lost: str, accept: bool) -> None:
    settings = config(tmp_path / "run")
    run = trained(settings, stop_at=2)
    path = run.checkpoint(2) / "manifest.json"
    manifest, _ = read_manifest(path.parent)
    del manifest[lost]
    write(manifest, path)
    done = train(settings, accept_changes=accept)
    assert done.codes == [3, 3], done.errors
    assert f"checkpoint {path.parent}: malformed manifest (KeyError: '{lost}')" in done.errors[0]
    assert done.rows == run.rows


def test_other_option_groups_cannot_be_accepted(tmp_path: Path) -> None:
    trained(config(tmp_path / "run", optimizer=ADAMW), stop_at=2)
    grouped = {**ADAMW, "options": [{"match": ["w"], "lr_scale": 0.5}]}
    done = train(config(tmp_path / "run", optimizer=grouped), accept_changes=True)
    assert done.codes == [3, 3], done.errors
    assert "optimizer.option groups: saved 1, this run 2; --accept-changes cannot turn" in done.errors[0]
