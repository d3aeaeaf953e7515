"""Runs that go on at another number of ranks: the state of every tensor is the same to the bit, by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardrun.checkpoint.inspect import inspect
from shardrun.checkpoint.manifest import MANIFEST, read_manifest
from shardrun.checkpoint.reshard import reshard
from tests.golden.runs import flip
from tests.support.training import RECIPES, Trained, document, train, trained

pytestmark = pytest.mark.sample(5)

GPT = str(RECIPES.parents[2] / "recipes" / "gpt.py")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "lr": 1e-2, "options": [{"match": ["*norm.weight"], "weight_decay": 0.0}]},
    "sgd": {"name": "sgd", "lr": 1e-2, "momentum": 0.9},
    "muon": {"name": "muon", "lr": 1e-2, "rest": {"name": "adamw", "lr": 1e-3, "match": ["embed.*"]}},
}


def config(run_dir: Path, world_size: int, optimizer: str = "adamw", parameters: str = "fp32") -> dict[str, Any]:
    text = run_dir.parent / "text.txt"
    if not text.exists():
        text.write_text("to be, or not to be, that is the question. " * 60)
    sections = {
        "optimizer": OPTIMIZERS[optimizer],
        "precision": {"parameters": parameters},
        "train": {"steps": 4, "micro_batch_size": 1, "global_batch_size": 6},
        "checkpoint": {"every": 1, "keep": 9},
    }
    args = {"layers": 1, "width": 16, "heads": 2, "context": 8, "text": str(text), "dropout": 0.1}
    return document(run_dir, world_size, sections, GPT, **args)


def tensors(checkpoint: Path) -> dict[str, list[Any]]:
    """Name -> dtype, shape and hash of every tensor of the model and of the whole optimizer state."""
    found = inspect(checkpoint, verify=True)
    assert found["problems"] == []
    rows = [*found["model"], *(row for group in found["groups"].values() for row in group["state"])]
    assert all(row.get("sha256") or row.get("alias_of") for row in rows)
    return {row["name"]: [row["dtype"], row["shape"], row.get("sha256")] for row in rows}


def records(checkpoint: Path) -> dict[str, bytes]:
    return {str(p.relative_to(checkpoint)): p.read_bytes() for p in sorted(checkpoint.glob("zero[12]/*/*"))}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("optimizer", "parameters"), [("adamw", "bf16"), ("sgd", "fp32"), ("muon", "fp32")], ids=["adamw", "sgd", "muon"]
)
def test_one_two_three_one_keeps_every_tensor_and_three_ranks_go_on(
    tmp_path: Path, optimizer: str, parameters: str
) -> None:
    begun = trained(config(tmp_path / "1", 1, optimizer, parameters), stop_at=2).checkpoint(2)
    links = [begun]
    for number, world_size in enumerate((2, 3, 1)):
        links.append(reshard(links[-1], tmp_path / f"link-{number}", world_size).path)
        assert tensors(links[-1]) == tensors(begun)
    assert records(links[-1]) == records(begun)
    assert (links[-1] / "model.safetensors").read_bytes() == (begun / "model.safetensors").read_bytes()
    wanted = trained(config(tmp_path / "1", 1, optimizer, parameters)).model(4)
    found = trained(config(tmp_path / "3", 3, optimizer, parameters), resume_from=str(links[2]))
    assert [row["step"] for row in found.steps] == [3, 4]
    for name, tensor in found.model(4).items():
        tolerance = 1e-2 if parameters == "bf16" else 1e-4  # a sum in another order is rounded to a neighbour
        assert torch.allclose(tensor.float(), wanted[name].float(), rtol=tolerance, atol=tolerance), name


def test_owners_of_whole_tensors_are_those_that_a_run_chooses_itself(tmp_path: Path) -> None:
    alone = trained(config(tmp_path / "alone", 1, "muon"), stop_at=1).checkpoint(1)
    pair = trained(config(tmp_path / "pair", 2, "muon"), stop_at=1).checkpoint(1)
    owners = [
        read_manifest(checkpoint)[0]["groups"]["default"]["optimizer"]["owners"]
        for checkpoint in (pair, reshard(alone, tmp_path / "two", 2).path)
    ]
    assert owners[0] == owners[1]
    assert set(owners[0].values()) == {0, 1}
    back = reshard(reshard(pair, tmp_path / "three", 3).path, tmp_path / "back", 2).path
    assert records(back) == records(pair)


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 3)])
def test_on_the_fly_is_the_same_as_a_reshard_and_a_resume(tmp_path: Path, before: int, now: int) -> None:
    begun = trained(config(tmp_path / "first", before), stop_at=2)
    shutil.copytree(begun.run_dir, tmp_path / "fly")
    made = reshard(begun.checkpoint(2), tmp_path / "made", now).path
    stepwise = trained(config(tmp_path / "stepwise", now), resume_from=str(made))
    fly = trained(config(tmp_path / "fly", now), reshard=True)
    assert equal(fly.model(4), stepwise.model(4))
    assert equal(fly.state(4), stepwise.state(4))
    for rank in range(now):  # random streams and buffers too
        name = f"state/rank-{rank:05d}-of-{now:05d}.safetensors"
        assert (fly.checkpoint(3) / name).read_bytes() == (stepwise.checkpoint(3) / name).read_bytes()
    assert [event["path"] for event in fly.events if event["event"] == "resumed"] == [str(fly.checkpoint(2))]
    assert read_manifest(fly.checkpoint(3))[0]["parent"] == "step-0000000002"
    for run, name in ((fly, "step-0000000002"), (stepwise, "made")):
        told = f"{name} was resharded from {before} to {now} ranks; exact, bit for bit: parameters"
        assert len([text for text in run.texts("note") if text.startswith(told)]) == 1
    assert list((fly.run_dir / "checkpoints" / ".staging").iterdir()) == []
    assert tensors(fly.checkpoint(2)) == tensors(made)  # what it came from is as it was
    # Once there is a checkpoint of this world size, nothing is resharded any more.
    again = trained(config(tmp_path / "fly", now), reshard=True)
    assert not [text for text in again.texts("note") if "resharded" in text]


def test_another_world_size_is_refused_unless_it_is_asked_for(tmp_path: Path) -> None:
    trained(config(tmp_path / "run", 2), stop_at=1)
    for options in ({}, {"accept_changes": True}):
        refused = train(config(tmp_path / "run", 1), **options)
        assert refused.codes == [3]
        assert "world size saved 2, this run 1 (resume with --reshard, or use `shardrun reshard`" in refused.errors[0]
    changed = config(tmp_path / "run", 1)
    changed["train"]["max_grad_norm"] = 0.5
    refused = train(changed, reshard=True)  # it lets nothing else through
    assert refused.codes == [2]
    assert "train.max_grad_norm: saved null, now 0.5" in refused.errors[0]
    assert "topology.world_size" not in refused.errors[0]


def damaged(tmp_path: Path) -> Trained:
    run = trained(config(tmp_path / "run", 2), stop_at=2)
    record = next((run.checkpoint(2) / "zero2" / "default").iterdir())
    flip(record, 8 * record.stat().st_size - 3)
    return run


def test_damage_is_refused_by_all_ranks_and_an_older_checkpoint_is_taken_if_asked_for(tmp_path: Path) -> None:
    run = damaged(tmp_path)
    refused = train(config(tmp_path / "run", 3), reshard=True)
    assert refused.codes == [3, 3, 3]
    assert all("blake3:" in error and "its content was changed" in error for error in refused.errors)
    assert list((run.run_dir / "checkpoints" / ".staging").iterdir()) == []
    done = trained(config(tmp_path / "run", 3), reshard=True, allow_fallback=True)
    assert [event["path"] for event in done.events if event["event"] == "resumed"] == [str(run.checkpoint(1))]
    assert any("its content was changed" in text for text in done.texts("note"))


def test_a_checkpoint_with_a_wrong_size_is_told_as_in_any_resume(tmp_path: Path) -> None:
    run = trained(config(tmp_path / "run", 2), stop_at=2)
    with (run.checkpoint(2) / MANIFEST).open("ab") as file:
        file.write(b" ")
    refused = train(config(tmp_path / "run", 3), reshard=True)
    assert set(refused.codes) == {3}
    assert "is damaged" in refused.errors[0]
    done = trained(config(tmp_path / "run", 3), reshard=True, allow_fallback=True)
    assert [event["path"] for event in done.events if event["event"] == "resumed"] == [str(run.checkpoint(1))]


def test_where_nothing_has_to_be_resharded_a_damaged_one_is_gone_back_from_all_the_same(tmp_path: Path) -> None:
    """--reshard stands in the command that a restart or a user gives again."""
    run = trained(config(tmp_path / "run", 2), stop_at=2)
    model = run.checkpoint(2) / "model.safetensors"
    flip(model, 8 * model.stat().st_size - 5)
    done = trained(config(tmp_path / "run", 2), reshard=True, allow_fallback=True)
    assert [event["path"] for event in done.events if event["event"] == "resumed"] == [str(run.checkpoint(1))]
    assert sum("its content was changed" in text for text in done.texts("note")) == 1
