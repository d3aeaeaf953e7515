"""Proving a real run: a replay between two of its checkpoints, and what it says of runs that cannot be proven."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from shardrun.checkpoint.difference import diff
from shardrun.checkpoint.inspect import inspect
from shardrun.checkpoint.manifest import MANIFEST, read_manifest, seal
from shardrun.cli import verify_resume as command
from shardrun.config.load import from_mapping, resolved_yaml
from shardrun.errors import CheckpointError, UsageError
from shardrun.records.header import read_header
from shardrun.run.launch import Screen
from shardrun.run.legs import LegFailed
from shardrun.run.lineage import Pair, choose
from shardrun.run.outcome import Outcome
from shardrun.run.proof import Proof, limits
from shardrun.run.replay import Replay
from shardrun.run.verify import Verification
from shardrun.run.worker_process import Job
from tests.ranks.test_groups_train import moe
from tests.support.training import RECIPES, Trained, document, trained
from tests.support.verifying import Silent, forked

pytestmark = pytest.mark.sample(6)

NET = str(RECIPES / "verify_net.py")
ADAMW = {"name": "adamw", "lr": 0.01}


def config(run_dir: Path, recipe: str = NET, world_size: int = 1, **recipe_args: Any) -> dict[str, Any]:
    """8 windows, four to an epoch, saved after every second one and all kept."""
    sections = {
        "optimizer": ADAMW,
        "train": {"steps": 8, "micro_batch_size": 2, "global_batch_size": 8, "max_grad_norm": 1.0},
        "checkpoint": {"every": 2, "keep": 20},
        "eval": {"every": 3, "at_end": True},
        "data": {"shuffle": True},
        "precision": {"parameters": "bf16"},
    }
    return document(run_dir, world_size, sections, recipe, **recipe_args)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two ranks, stopped after 5 windows and resumed: 1, 2, 4 and 5 are of the first start, 6 and 8 of the second."""
    asked = config(tmp_path_factory.mktemp("replay") / "run", world_size=2)
    trained(asked, stop_at=5)
    done = trained(asked)
    (done.run_dir / "config.resolved.yaml").write_text(resolved_yaml(from_mapping(asked)))
    return done


def replay(pair: Pair, folder: Path) -> Proof:
    folder.mkdir()
    return Replay(pair, folder, Silent(), start=forked).run()


@pytest.mark.parametrize(
    ("first", "last", "claim", "not_claimed"),
    [
        (None, None, "a resume at step 6 is the same as going on: the run did not stop", None),
        ("4", "step-0000000008", "stopped and resumed at step 5, is the one that never stopped", None),
        ("5", "8", "the resume at step 5 gives the same again", "did not stop at step 5: it was itself resumed there"),
    ],
)
def test_a_replay_is_the_run_to_the_bit(
    interrupted: Trained, tmp_path: Path, first: str | None, last: str | None, claim: str, not_claimed: str | None
) -> None:
    proof = replay(choose(interrupted.run_dir, first, last), tmp_path / "scratch")
    assert (proof.first, proof.exit_code) == (None, 0)
    assert claim in proof.claim
    assert not_claimed is None or not_claimed in " ".join(proof.not_claimed)
    counts = {row.what: row.values for row in proof.rows}
    # 7 * 15 + 15 + 15 * 3 + 3 parameters; 15 + 1 elements of buffers in the model, 3 more per rank in its own state.
    assert (counts["parameters"], counts["fp32 masters"], counts["optimizer exp_avg"]) == (168, 168, 168)
    assert counts["buffers"] >= 16
    assert all(counts[what] for what in ("rng python", "rng numpy", "rng torch", "optimizer step", "metrics")), counts
    assert {"counters", "schedule", "data position", "config", "layout of groups"} <= counts.keys()
    assert proof.facts["files"] == "5 of 5 byte-identical"
    assert proof.facts["recipe"]["sha256"]
    assert any("gives no `identity`" in line for line in proof.not_claimed)
    assert proof.hints == []


def test_the_page_has_all_that_a_reader_needs(interrupted: Trained, tmp_path: Path) -> None:
    page = (proof := replay(choose(interrupted.run_dir), tmp_path / "scratch")).to_text()
    assert max(map(len, page.splitlines())) <= 100
    assert len(page.splitlines()) < 75
    for words in (
        "BIT-IDENTICAL",
        "torch 2",
        "sha256",
        "fp32 masters",
        "Not claimed",
        "processor",
        str(proof.facts["run"]["id"]),
    ):
        assert words in page
    assert proof.to_json()["claim"] == proof.claim


def test_the_command_tells_it_to_people_and_to_machines(
    interrupted: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "Replay", partial(Replay, start=forked))
    page = tmp_path / "page.txt"
    assert command.run(interrupted.run_dir, [], command.Ask(first="4", last="6", report=page)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "replaying windows 5 to 6 on 2 ranks"
    assert lines[1].startswith("replayed windows 5 to 6 (")
    assert f"run {interrupted.run_dir}, replayed from step 4 to step 6" in lines
    assert lines[-2] == f"report: {page}"
    assert lines[-1].startswith(
        "bit-identical: the run, which was stopped and resumed at step 5, is the one that never"
    )
    assert page.read_text().startswith("Report of shardrun verify-resume\n")
    assert command.run(interrupted.run_dir, [], command.Ask(json=True)) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    assert {
        "verdict": "bit-identical",
        "mode": "run",
        "from": "step-0000000006",
        "scratch": None,
    }.items() <= document.items()
    assert document["facts"]["versions"]["torch"].startswith("2.")
    for ask, words in (
        (command.Ask(worlds="2,1"), []),
        (command.Ask(), ["train.steps=4"]),
        (command.Ask(report=tmp_path / "no" / "page"), []),
    ):
        with pytest.raises(UsageError):
            command.run(interrupted.run_dir, words, ask)


def test_a_run_that_was_saved_in_the_background_is_replayed(tmp_path: Path) -> None:
    asked = config(tmp_path / "run")
    asked["checkpoint"] = {"every": 2, "keep": 2, "keep_every": 4, "async": True}
    proof = replay(choose(trained(asked).run_dir), tmp_path / "scratch")
    assert (proof.first, proof.facts["from"]["checkpoint"]) == (None, "step-0000000006")


# ---- runs that are not what a replay gives ---------------------------------------------------------------------------

CHANCE = """
import os
from tests.support.recipes.verify_net import Args, build_data, build_model, collate
from tests.support.recipes import verify_net

def loss(model, batch, world):
    total, weight = verify_net.loss(model, batch, world)
    return total * (1 + os.urandom(1)[0] / 1000), weight
"""


@pytest.mark.parametrize(
    ("fault", "told", "claims_data"),
    [
        ("attribute", "two replays are equal to each other: what the run had and the replays had not", True),
        ("data", "the data of this recipe cannot be resumed: step 5, rank 0, micro-batch 0: asked again", False),
        ("loss", "two replays from the same checkpoint differ from each other", True),
    ],
)
def test_what_cannot_be_resumed_is_told_apart(tmp_path: Path, fault: str, told: str, claims_data: bool) -> None:
    recipe = NET
    if fault == "loss":
        recipe = str(tmp_path / "chance.py")
        Path(recipe).write_text(CHANCE)
    done = trained(config(tmp_path / "run", recipe, fault="none" if fault == "loss" else fault))
    proof = replay(choose(done.run_dir, "4", "6"), tmp_path / "scratch")
    assert proof.exit_code == 4
    assert proof.first is not None
    assert proof.first.startswith("step 5, metrics: ")  # the window in which it shows first
    assert told in proof.hints[-1]
    assert claims_data != any("that the data of a resumed run are those" in line for line in proof.not_claimed)
    assert "DIFFERENT" in proof.to_text()
    assert proof.to_json()["claim"] is None


def flip_and_seal(checkpoint: Path, relative: str, name: str) -> None:
    """Change the lowest bit of the first element of a tensor, and the manifest with it: a sound checkpoint of another
    state."""
    file, entry = checkpoint / relative, read_header(checkpoint / relative).tensors[name]
    raw = bytearray(file.read_bytes())
    raw[entry.start] ^= 1
    file.write_bytes(raw)
    manifest = read_manifest(checkpoint)[0]
    for one in manifest["files"]:
        if one["path"] == relative:
            one["hash"] = f"blake3:{blake3(raw).hexdigest()}"
    (checkpoint / MANIFEST).write_bytes(seal({key: value for key, value in manifest.items() if key != "digest"}))


@pytest.mark.parametrize(
    ("relative", "name", "what"),
    [
        ("zero2/default/rank-00001-of-00002.safetensors", "second.weight/exp_avg", "optimizer exp_avg"),
        ("state/rank-00001-of-00002.safetensors", "rng/torch", "rng torch"),
        ("state/rank-00000-of-00002.safetensors", "buffer/recent", "buffers"),
    ],
)
def test_one_bit_of_what_the_run_saved_is_found_and_named(
    interrupted: Trained, tmp_path: Path, relative: str, name: str, what: str
) -> None:
    run_dir = Path(shutil.copytree(interrupted.run_dir, tmp_path / "run"))
    flip_and_seal(run_dir / "checkpoints" / "step-0000000008", relative, name)
    proof = replay(choose(run_dir), tmp_path / "scratch")
    assert [row.what for row in proof.rows if row.first] == [what]
    assert proof.first is not None
    assert proof.first.startswith(f"step 8, {what}: ")
    assert f"{name}, element " in proof.first
    assert "(1 of " in proof.first
    assert proof.facts["files"] == "4 of 5 byte-identical"


def test_an_edited_recipe_is_told_and_replayed_as_it_is_now(tmp_path: Path) -> None:
    recipe = tmp_path / "net.py"
    shutil.copy(NET, recipe)
    done = trained(config(tmp_path / "run", str(recipe)))
    recipe.write_text(recipe.read_text() + "# edited\n")
    proof = replay(choose(done.run_dir), tmp_path / "scratch")
    assert proof.exit_code == 0
    told = [line for line in proof.not_claimed if "was edited" in line]
    assert [line.partition(" is what")[0].rpartition(" ")[2] for line in told] == ["step-0000000006", "step-0000000008"]
    recipe.unlink()
    with pytest.raises(UsageError, match="the recipe of the run is not there any more"):
        replay(choose(done.run_dir), tmp_path / "again")


def test_a_replay_that_fails_names_its_leg(tmp_path: Path) -> None:
    recipe = tmp_path / "net.py"
    shutil.copy(NET, recipe)
    done = trained(config(tmp_path / "run", str(recipe)))
    recipe.write_text("raise RuntimeError('gone')\n")
    with pytest.raises(LegFailed, match="replay failed"):
        replay(choose(done.run_dir), tmp_path / "scratch")


def test_a_checkpoint_that_vanishes_during_the_replay_is_no_difference(interrupted: Trained, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(interrupted.run_dir, tmp_path / "run"))

    def start(job: Job, screen: Screen) -> Outcome:
        outcome = forked(job, screen)
        shutil.rmtree(run_dir / "checkpoints" / "step-0000000008")
        return outcome

    (tmp_path / "scratch").mkdir()
    with pytest.raises(CheckpointError, match=r"step-0000000008/.*nothing is proven"):
        Replay(choose(run_dir), tmp_path / "scratch", Silent(), start=start).run()


def test_a_start_that_vanishes_before_the_replay_is_no_new_beginning(interrupted: Trained, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(interrupted.run_dir, tmp_path / "run"))

    def start(job: Job, screen: Screen) -> Outcome:
        shutil.rmtree(run_dir / "checkpoints" / "step-0000000006")
        return forked(job, screen)

    (tmp_path / "scratch").mkdir()
    with pytest.raises(LegFailed, match="replay failed") as failed:
        Replay(choose(run_dir), tmp_path / "scratch", Silent(), start=start).run()
    assert failed.value.exit_code == CheckpointError.exit_code


# ---- which two -------------------------------------------------------------------------------------------------------


def damage(run_dir: Path) -> None:
    os.truncate(run_dir / "checkpoints" / "step-0000000008" / "model.safetensors", 10)


def only_one(run_dir: Path) -> None:
    for step in (1, 2, 4, 5, 6):
        shutil.rmtree(run_dir / "checkpoints" / f"step-{step:010d}")


def no_run(run_dir: Path) -> None:
    checkpoint = run_dir / "checkpoints" / "step-0000000006"
    manifest = {key: value for key, value in read_manifest(checkpoint)[0].items() if key != "digest"}
    (checkpoint / MANIFEST).write_bytes(seal({**manifest, "attempt": None, "meaning": []}))


def nothing(run_dir: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "names", "kind", "told"),
    [
        (damage, (None, None), CheckpointError, "step-0000000008 is damaged"),
        (only_one, (None, None), UsageError, "holds no checkpoint before step-0000000008"),
        (
            no_run,
            (None, None),
            CheckpointError,
            "step-0000000006: its manifest has no attempt, meaning; it is no run's",
        ),
        (nothing, ("8", "6"), UsageError, "the first was not saved before the second"),
        (nothing, ("3", None), CheckpointError, "holds no checkpoint step-0000000003; there are step-0000000008, "),
    ],
)
def test_two_that_no_replay_lies_between_are_refused(
    interrupted: Trained,
    tmp_path: Path,
    change: Callable[[Path], None],
    names: tuple[str | None, str | None],
    kind: type[Exception],
    told: str,
) -> None:
    run_dir = Path(shutil.copytree(interrupted.run_dir, tmp_path / "run"))
    change(run_dir)
    with pytest.raises(kind, match=told):
        choose(run_dir, *names)


def test_a_checkpoint_is_no_run_and_the_folder_of_all_of_them_is_one(interrupted: Trained) -> None:
    with pytest.raises(UsageError, match="is one checkpoint; give the folder of its run"):
        choose(interrupted.checkpoint(8))
    assert choose(interrupted.run_dir / "checkpoints").run_dir == interrupted.run_dir


def test_another_torch_is_told(interrupted: Trained, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(interrupted.run_dir, tmp_path / "run"))
    for step in (6, 8):
        checkpoint = run_dir / "checkpoints" / f"step-{step:010d}"
        manifest = {key: value for key, value in read_manifest(checkpoint)[0].items() if key != "digest"}
        manifest["numerics"]["torch"] = "2.0.1"
        (checkpoint / MANIFEST).write_bytes(seal(manifest))
    proof = replay(choose(run_dir), tmp_path / "scratch")
    assert proof.exit_code == 0  # it happens to give the same here
    told = [line for line in proof.not_claimed if 'numerics.torch: saved "2.0.1", now ' in line]
    assert len(told) == 2


def test_every_stop_that_a_replay_passes_is_told(tmp_path: Path) -> None:
    asked = config(tmp_path / "run")
    for stop in (3, 5, 7):
        trained(asked, stop_at=stop)
    run_dir = trained(asked).run_dir
    assert "stopped and resumed at steps 3, 5 and 7, is" in choose(run_dir, "2", "8").claim
    pair = choose(run_dir, "5", "8")
    assert "stopped and resumed at step 7, is" in pair.claim
    assert "did not stop at step 5" in pair.not_claimed[0]
    shutil.rmtree(run_dir / "checkpoints" / "step-0000000005")
    pair = choose(run_dir, "2", "8")
    assert "stopped and resumed at step 7, is" in pair.claim
    assert pair.not_claimed == (
        "that the run went on from nothing else in between: some of its checkpoints between the two are gone",
    )


def test_what_went_on_from_elsewhere_is_refused(interrupted: Trained, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(interrupted.run_dir, tmp_path / "run"))
    asked = config(run_dir, world_size=2)
    trained(asked, resume_from=str(run_dir / "checkpoints" / "step-0000000002"), stop_at=7)
    with pytest.raises(UsageError, match="did not come after step-0000000005: the run went on from step-0000000004"):
        choose(run_dir, "5", "7")
    asked["optimizer"] = {**ADAMW, "lr": 0.5}
    trained(asked, accept_changes=True)
    with pytest.raises(UsageError, match=r"the config was changed between them[^$]*optimizer.lr: saved 0.01, now 0.5"):
        choose(run_dir, "7", "8")


def test_a_checkpoint_that_was_saved_anew_is_not_what_a_later_one_came_from(tmp_path: Path) -> None:
    asked = config(tmp_path / "run")
    trained(asked, stop_at=4)
    run_dir = trained(asked, stop_at=6).run_dir
    was = choose(run_dir, "2", "6")
    assert ("stopped and resumed at step 4, is" in was.claim, was.not_claimed) == (True, ())
    older = run_dir / "checkpoints" / "step-0000000002"
    trained(asked, resume_from=str(older), stop_at=4)  # another 4, of which 6 knows nothing
    pair = choose(run_dir, "2", "6")
    assert "gone" in pair.not_claimed[0]
    asked["checkpoint"] = {"every": 20, "keep": 20}
    trained(asked, resume_from=str(older), stop_at=5)
    assert choose(run_dir).start.path == older  # 4 is newer, but 5 did not come from it


def test_the_config_of_a_start_that_was_refused_is_not_replayed(interrupted: Trained, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(interrupted.run_dir, tmp_path / "run"))
    resolved = run_dir / "config.resolved.yaml"
    resolved.write_text(resolved.read_text().replace("lr: 0.01", "lr: 0.25"))
    assert [line for line in choose(run_dir).notes if "optimizer.lr: saved 0.01, now 0.25" in line]
    resolved.unlink()
    assert "cannot be read" in choose(run_dir).notes[0]


def test_a_config_whose_data_cannot_be_resumed_is_told_what_cannot_be_claimed(tmp_path: Path) -> None:
    settings = from_mapping(config(tmp_path / "run", fault="data"))
    (tmp_path / "scratch").mkdir()
    verdict = Verification(settings, tmp_path / "scratch", Silent(), start=forked).run()
    assert verdict.exit_code == 4
    assert verdict.unsteady is not None
    told = list(limits(None, unsteady=verdict.unsteady))
    assert told[0].startswith("that the data of a resumed run are those of one that never stopped: step ")
    assert "asked again for the same samples, the data set gives something else" in told[0]


def test_a_run_of_several_groups_is_proven_too(tmp_path: Path) -> None:
    """Dense weights on four ranks, experts on two of them each: the parts of the model are in several files."""
    asked = moe(tmp_path / "run", 2, 2, checkpoint={"every": 2, "keep": 9})
    trained(asked, stop_at=3)
    (tmp_path / "run" / "config.resolved.yaml").write_text(resolved_yaml(from_mapping(asked)))
    proof = replay(choose(trained(asked).run_dir, "2", "6"), tmp_path / "scratch")
    assert proof.first is None
    assert "stopped and resumed at step 3" in proof.claim
    found = inspect(tmp_path / "run" / "checkpoints" / "step-0000000006", verify=True)
    assert found["good"]
    assert found["left"]["tensors"] == {
        "whole": found["left"]["tensors"]["whole"],
        "unverified": 0,
        "partly": 0,
        "lost": 0,
    }
    elsewhere = trained(moe(tmp_path / "elsewhere", 1, 2, checkpoint={"every": 2, "keep": 9}))
    apart = diff(tmp_path / "run", elsewhere.run_dir)  # the same state up to rounding, in other groups on other ranks
    assert apart["counts"].keys() <= {"same", "values"}
    counts = {row.what: row.values for row in proof.rows}
    stored = [row for row in found["model"] if row["alias_of"] is None]
    assert counts["parameters"] == sum(prod(row["shape"]) for row in stored)
    assert counts["optimizer exp_avg"] == counts["parameters"]
