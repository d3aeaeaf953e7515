"""Training runs under zero1 on several ranks: stop and go on, owners, verifications with controls, accepted changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardrun.config.load import load
from shardrun.run.verify import Verification
from tests.support.training import RECIPES, Trained, document, train, trained
from tests.support.verifying import Silent, forked, verify_config

pytestmark = pytest.mark.sample(5)

OWN = str(RECIPES / "own_optimizer.py")
MUON: dict[str, Any] = {"name": "muon", "lr": 0.02, "rest": {"name": "adamw", "lr": 0.003}}
ROWS = {"factory": "Rows", "kind": "matrix", "lr": 0.01, "takes": "matrices"}
ADAFACTOR = {"factory": "Adafactor", "kind": "matrix", "lr": 0.01}
SIGNS = {"factory": "signs", "kind": "elementwise", "lr": 0.01}
ADAMW1 = {"name": "adamw", "lr": 0.01, "strategy": "zero1"}


def config(folder: Path, world: int, optimizer: dict[str, Any], dtype: str = "fp32", **sections: Any) -> dict[str, Any]:
    base = {
        "optimizer": optimizer,
        "train": {"steps": 4, "micro_batch_size": 2, "global_batch_size": 2 * world},
        "precision": {"parameters": dtype},
    }
    return document(folder, world, {**base, **sections}, OWN)


def same_state(one: Trained, other: Trained, step: int) -> None:
    for held, again in ((one.model(step), other.model(step)), (one.state(step), other.state(step))):
        assert held.keys() == again.keys()
        assert all(torch.equal(tensor, again[name]) for name, tensor in held.items())


@pytest.mark.parametrize(("dtype", "world"), [("fp32", 2), ("bf16", 3)])
@pytest.mark.parametrize("optimizer", [MUON, ROWS, ADAFACTOR, SIGNS], ids=["muon", "rows", "adafactor", "signs"])
def test_a_run_that_stopped_ends_with_the_bits_of_one_that_did_not(
    tmp_path: Path, optimizer: dict[str, Any], dtype: str, world: int
) -> None:
    straight = trained(config(tmp_path / "straight", world, optimizer, dtype))
    settings = config(tmp_path / "stopped", world, optimizer, dtype)
    trained(settings, stop_at=2)
    resumed = trained(settings)
    assert [row["step"] for row in resumed.steps] == [1, 2, 3, 4]
    assert resumed.steps == straight.steps
    same_state(straight, resumed, 4)


def test_zero1_on_two_ranks_has_the_bits_of_zero2(tmp_path: Path) -> None:
    for dtype in ("fp32", "bf16"):
        owned, cut = (
            trained(config(tmp_path / f"{way}-{dtype}", 2, {**ADAMW1, "strategy": way}, dtype))
            for way in ("zero1", "zero2")
        )
        assert all(torch.equal(tensor, cut.model(4)[name]) for name, tensor in owned.model(4).items())
        assert owned.steps == cut.steps
        state = owned.state(4)
        assert {name: t.reshape(-1).tolist() for name, t in state.items()} == {
            name: t.reshape(-1).tolist() for name, t in cut.state(4).items()
        }


def test_each_parameter_is_in_the_file_of_its_owner(tmp_path: Path) -> None:
    run = trained(config(tmp_path / "run", 2, MUON))
    manifest = json.loads((run.checkpoint(4) / "manifest.json").read_text())
    optimizer = manifest["groups"]["default"]["optimizer"]
    owners = optimizer["owners"]
    assert (optimizer["strategy"], optimizer["name"], optimizer["rest"]) == ("zero1", "muon", "adamw")
    assert set(owners.values()) == {0, 1}
    records = [entry for entry in manifest["files"] if entry["role"] == "record"]
    assert [entry["path"] for entry in records] == [f"zero1/default/rank-0000{n}-of-00002.safetensors" for n in (0, 1)]
    shapes = {"first.weight": 105, "first.bias": 15, "second.weight": 45, "second.bias": 3}
    for entry in records:
        assert entry["fragments"] == {p: [0, n] for p, n in shapes.items() if owners[p] == entry["rank"]}
    told = next(event["tables"] for event in run.events if event["event"] == "start")
    (table,) = [one for one in told if one["title"] == "owners"]
    assert [row[1] for row in table["rows"]] == [list(owners.values()).count(rank) for rank in (0, 1)]
    assert sum(float(row[3].rstrip("%")) for row in table["rows"]) == pytest.approx(100, abs=0.2)


def test_a_model_that_defines_its_parameters_in_another_order_goes_on(tmp_path: Path) -> None:
    """Owners and layout are those of the checkpoint."""
    recipe = tmp_path / "recipe.py"
    body = (
        "from tests.support.recipes.verify_net import Args, build_data, collate, loss\n"
        "from tests.support.recipes import verify_net\n\n"
        "def build_model(args):\n    model = verify_net.build_model(args)\n"
    )
    recipe.write_text(body + "    return model\n")
    settings = {**config(tmp_path / "run", 2, MUON), "recipe": str(recipe)}
    straight = trained({**settings, "run": {"name": "x", "dir": str(tmp_path / "straight")}})
    trained(settings, stop_at=2)
    recipe.write_text(body + "    model.first = model._modules.pop('first')\n    return model\n")
    resumed = trained(settings, accept_changes=True)
    same_state(straight, resumed, 4)


# ---- a verification --------------------------------------------------------------------------------------------------


def verification(folder: Path, world: int, optimizer: dict[str, Any], tamper: str | None = None) -> Verification:
    path = verify_config(folder, topology={"world_size": world}, precision={"parameters": "bf16"})
    groups = [{"match": ["*.bias"], "lr_scale": 0.5}]
    written = {**json.loads(path.read_text()), "recipe": OWN, "optimizer": {**optimizer, "options": groups}}
    path.write_text(json.dumps(written))
    return Verification(load(path), folder / "scratch", Silent(), tamper=tamper, start=forked)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("optimizer", [MUON, ROWS], ids=["muon", "rows"])
def test_a_resume_is_proven_bit_identical(tmp_path: Path, optimizer: dict[str, Any], world: int) -> None:
    verdict = verification(tmp_path, world, optimizer).run()
    assert verdict.first is None, verdict.first
    compared = {row.what: row.values for row in verdict.rows}
    assert all(compared.values()), compared
    own = {"optimizer momentum_buffer"} if optimizer is MUON else {"optimizer size", "optimizer numbers"}
    assert compared.keys() >= {"fp32 masters", "optimizer exp_avg", "optimizer step", *own}
    assert compared["fp32 masters"] == 168 * 5


@pytest.mark.parametrize(
    ("tamper", "optimizer", "what"),
    [
        ("moment", MUON, {"optimizer momentum_buffer", "optimizer exp_avg"}),
        ("step-count", MUON, {"optimizer step"}),
        ("master", MUON, {"fp32 masters"}),
        ("step-count", SIGNS, {"optimizer numbers"}),
    ],
)
def test_what_an_owner_restores_wrongly_is_named(
    tmp_path: Path, tamper: str, optimizer: dict[str, Any], what: set[str]
) -> None:
    optimizer = {**optimizer, "strategy": "zero1"}
    sound = verification(tmp_path, 2, optimizer)
    plan = sound.straight()
    sound.leg(plan, 1)
    spoiled = verification(tmp_path, 2, optimizer, tamper)
    spoiled.leg(plan, 2)
    first = spoiled.verdict(plan).first
    assert first is not None
    assert first.what in what
    assert (first.when, first.rank) == ("after the restore", 1)


# ---- changes ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run under muon after its second window."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    trained(config(folder, 2, MUON), stop_at=2)
    return folder


@pytest.mark.parametrize(
    "change",
    [
        {"ns_steps": 3, "momentum": 0.5, "lr": 0.01},
        {"rest": {"name": "adamw", "lr": 0.003, "betas": [0.5, 0.5]}},
        {"rest": {"name": "adamw", "lr": 0.01, "fused": False}},
    ],
)
def test_options_may_change_if_that_is_accepted(tmp_path: Path, stopped: Path, change: dict[str, Any]) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    settings = config(tmp_path / "run", 2, {**MUON, **change})
    assert train(settings).codes == [2, 2]
    assert [row["step"] for row in trained(settings, accept_changes=True).steps] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "adamw", "strategy": "zero1"}, "optimizer.name: saved 'muon', this run 'adamw'"),
        ({"name": "adamw", "strategy": "zero2"}, "optimizer.strategy: saved 'zero1', this run 'zero2'"),
        ({**MUON, "rest": {"name": "adam"}}, "optimizer.rest: saved 'adamw', this run 'adam'"),
        (
            {**MUON, "rest": {"name": "adamw", "amsgrad": True}},
            "optimizer.rest_groups.0.amsgrad: saved False, this run T",
        ),
    ],
)
def test_another_state_cannot_be_accepted(tmp_path: Path, stopped: Path, change: dict[str, Any], said: str) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    done = train(config(tmp_path / "run", 2, {"lr": 0.01, **change}), accept_changes=True)
    assert done.codes == [3, 3]
    assert said in done.errors[0]
    assert "--accept-changes cannot turn one state into another" in done.errors[0]


def test_another_strategy_is_another_meaning(tmp_path: Path, stopped: Path) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    done = train(config(tmp_path / "run", 2, {"name": "adamw", "lr": 0.02}))
    assert done.codes == [2, 2]
    assert 'optimizer.strategy: saved "zero1", now "zero2"' in done.errors[0]


def test_a_false_claim_ends_the_run_before_it_starts(tmp_path: Path) -> None:
    done = train(config(tmp_path / "run", 2, {"factory": "normed", "kind": "elementwise", "lr": 0.1}))
    assert done.codes == [2, 2]
    assert "normed is declared elementwise, but a vector cut at multiples of 256 is stepped otherwise" in done.errors[0]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_matrix_cannot_change_its_optimizer(tmp_path: Path, stopped: Path) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    rest = {**MUON["rest"], "match": ["second.weight"]}
    done = train(config(tmp_path / "run", 2, {**MUON, "rest": rest}), accept_changes=True)
    assert done.codes == [3, 3]
    assert "does not fit this run" in done.errors[0]
    assert "layout" in done.errors[0]
