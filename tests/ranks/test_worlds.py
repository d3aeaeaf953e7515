"""Proving a reshard: the state of the new ranks is that of the old ones to the bit, and what is wrong is found."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardrun.cli import verify_resume as command
from shardrun.config.load import from_mapping
from shardrun.errors import UsageError
from shardrun.run.proof import Compared
from shardrun.run.worlds import WorldsVerification
from tests.ranks.test_groups_train import moe
from tests.support.training import RECIPES, document
from tests.support.verifying import Silent, forked, verify_config

pytestmark = pytest.mark.sample(3)

NET = str(RECIPES / "verify_net.py")
GPT = str(RECIPES.parents[2] / "recipes" / "gpt.py")


def verified(
    folder: Path, worlds: list[int], tamper: str | None = None, *, recipe: str = GPT, **sections: Any
) -> WorldsVerification:
    """Of a GPT with dropout, or of a net with running statistics."""
    asked = {
        "optimizer": {"name": "adamw", "lr": 0.01},
        "train": {"steps": 7, "micro_batch_size": 2, "global_batch_size": 8, "max_grad_norm": 1.0},
        "data": {"shuffle": True},
        **sections,
    }
    (folder / "text.txt").write_text("to be, or not to be, that is the question. " * 40)
    gpt = {"layers": 1, "width": 16, "heads": 2, "context": 8, "text": str(folder / "text.txt"), "dropout": 0.1}
    settings = from_mapping(document(folder / "run", 1, asked, recipe, **(gpt if recipe == GPT else {})))
    (folder / "scratch").mkdir()
    verification = WorldsVerification(settings, worlds, folder / "scratch", Silent(), tamper=tamper, start=forked)
    verification.run()
    return verification


def rows(verification: WorldsVerification) -> dict[str, Compared]:
    return {row.what: row for row in verification.found.rows}


@pytest.mark.parametrize(
    ("worlds", "sections"),
    [
        ([2, 1], {}),
        ([1, 3, 2], {"precision": {"parameters": "bf16"}}),
        ([2, 1], {"optimizer": {"name": "muon", "lr": 0.01, "rest": {"name": "adamw", "lr": 1e-3}}}),
    ],
    ids=["2,1", "1,3,2 bf16", "muon"],
)
def test_the_state_is_the_same_to_the_bit_and_the_run_stays_near(
    tmp_path: Path, worlds: list[int], sections: dict[str, Any]
) -> None:
    verification = verified(tmp_path, worlds, **sections)
    assert verification.found.first is None
    assert not verification.differs
    found = rows(verification)
    assert found["parameters, restored at 2"].values == verification.worlds[1] * found["parameters, at 5"].values
    kinds = {what.partition(",")[0] for what in found if what.endswith("restored at 2")}
    assert {"parameters", "counters", "schedule", "data position", "optimizer options"} < kinds
    state = {kind for kind in kinds if kind.startswith("optimizer ")} - {"optimizer options"}
    assert state >= (
        {"optimizer momentum_buffer"} if "optimizer" in sections else {"optimizer exp_avg", "optimizer step"}
    )
    assert ("fp32 masters" in kinds) == ("precision" in sections)
    assert all(row.values for row in found.values()), found
    for what in ("data seen, 3 to 5", "data seen, 6 to 7", "loss, 3 to 5", "parameters, at 5", "parameters, at 7"):
        assert found[what].first is None
    assert "(tolerance " in found["parameters, at 7"].verdict


@pytest.mark.parametrize(
    ("tamper", "what"),
    [
        ("parameter", "parameters"),
        ("moment", "optimizer exp_avg"),
        ("step-count", "optimizer step"),
        ("buffer", "buffers"),
        ("counter", "counters"),
        ("schedule", "schedule"),
        ("data-position", "data position"),
    ],
)
def test_what_a_reshard_gets_wrong_is_found_and_named(tmp_path: Path, tamper: str, what: str) -> None:
    verification = verified(tmp_path, [1, 2], tamper, recipe=NET)
    assert verification.differs
    assert verification.found.first is not None
    wrong = [row.what for row in verification.found.rows if row.first and row.what.endswith("restored at 2")]
    assert wrong == [f"{what}, restored at 2"]
    assert verification.found.first.startswith("restored at 2, ")
    assert verification.found.hint is None


def test_a_model_that_depends_on_the_number_of_ranks_is_told_apart(tmp_path: Path) -> None:
    verification = verified(tmp_path, [1, 2], recipe=NET)
    assert verification.differs
    assert {row.first for row in verification.found.exact} == {None}
    assert "its buffers are each rank's own, as running statistics are" in str(verification.found.hint)


def test_the_command_tells_what_is_exact_and_what_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "WorldsVerification", partial(WorldsVerification, start=forked))
    config, page = verify_config(tmp_path, recipe_args={"statistics": False}), tmp_path / "page.txt"
    assert command.run(config, [], command.Ask(worlds="2,1", report=page)) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "7 windows, resharded from 2 to 1 ranks at 2" in shown.out
    assert shown.out.splitlines()[-1].startswith(
        "exact at the reshard, within the tolerance after it: resharded from 2"
    )
    assert "not claimed: the bits after a reshard" in shown.out
    assert "ranks        world size 2, then 1; device cpu" in page.read_text()
    assert command.run(config, [], command.Ask(worlds="2,1", tamper="moment", json=True)) == 4
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["mode"], document["worlds"]) == ("different", "worlds", [2, 1])
    assert document["first_difference"].startswith("restored at 2, optimizer exp_avg/first.")
    with pytest.raises(UsageError, match="two or three numbers of ranks"):
        command.run(config, [], command.Ask(worlds="2,x"))


@pytest.mark.parametrize("worlds", [[2], [2, 1, 2, 1], [2, 0]])
def test_worlds_that_cannot_be_are_refused(tmp_path: Path, worlds: list[int]) -> None:
    with pytest.raises(UsageError, match="two or three numbers of ranks"):
        verified(tmp_path, worlds)


def test_ranks_that_are_laid_out_by_axes_are_refused(tmp_path: Path) -> None:
    settings = from_mapping(moe(tmp_path / "run", 1, 2))
    with pytest.raises(UsageError, match=r"by topology.axes \(replicas, experts\)"):
        WorldsVerification(settings, [2, 1], tmp_path, Silent())
