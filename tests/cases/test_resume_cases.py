"""Public bug reports about resuming: optimizer state, schedule, data, random numbers, frozen weights."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from shardrun.config.load import from_mapping
from shardrun.run.metrics import read_rows
from shardrun.run.verify import Verification
from tests.support.launching import shardrun, started
from tests.support.training import RECIPES, Trained, document, trained
from tests.support.verifying import Silent, forked

ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.0}
FALLING = {"optimizer": {"name": "sgd", "lr": 0.1}, "schedule": {"name": "linear", "total_steps": 10}}


def program(folder: Path, config: dict[str, Any], *words: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """`shardrun train` as a program in `folder`: exit code and stdout."""
    path = folder / "case.yaml"
    path.write_text(json.dumps(config))
    with started(shardrun("train", path, *words), folder, env) as running:
        code = running.wait(120)
        assert running.left(0.5) == {}
        return code, running.stdout


def recorded(base: Path, rank: int) -> list[dict[str, Any]]:
    """What the TOY recipe wrote down on `rank`, a line per micro-batch; validation is left out."""
    lines = [json.loads(line) for line in Path(f"{base}.rank-{rank}").read_text().splitlines()]
    return [line for line in lines if line["training"]]


def same_end(straight: Trained, resumed: Trained, step: int) -> None:
    """Parameters, optimizer state and logged rows are the same bits at `step`."""
    for held, other in ((straight.model(step), resumed.model(step)), (straight.state(step), resumed.state(step))):
        assert held.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in held.items())
    assert resumed.steps == straight.steps[-len(resumed.steps) :]


# ---- optimizer -----------------------------------------------------------------------------------------------------


def test_c010_the_step_count_of_adam_survives(tmp_path: Path) -> None:
    gradients = [1.0, 0.5, -0.25, 2.0, 1.0, -1.0, 0.5, 0.75]
    samples = [[x] for x in gradients for _ in range(2)]  # the same on both ranks
    sections = {"optimizer": ADAMW, "train": {"steps": 8}}
    config = document(tmp_path / "run", 2, sections, samples=samples, w=1.0)
    assert program(tmp_path, config, "--stop-at", "4")[0] == 75
    code, said = program(tmp_path, config)
    assert code == 0
    assert "resumed at step 4" in said
    done = Trained([], [], [], tmp_path / "run")
    assert float(done.model(8)["w"]) == pytest.approx(0.9455405, rel=1e-6)  # a lost count gives 0.9350074
    assert float(done.state(8)["w/step"]) == 8


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_c011_every_mode_writes_its_state_and_says_so(tmp_path: Path, dtype: str, world: int) -> None:
    sections = {
        "optimizer": ADAMW,
        "train": {"steps": 6, "micro_batch_size": 2, "global_batch_size": 8},
        "precision": {"parameters": dtype},
        "checkpoint": {"every": 3},
    }
    recipe = str(RECIPES / "verify_net.py")
    straight = trained(document(tmp_path / "straight", world, sections, recipe))
    listed = inspected(straight.checkpoint(3))
    paths = {row["name"] for row in listed["model"]} - {"running_mean", "batches"}
    keys = {"step", "exp_avg", "exp_avg_sq"} | ({"master"} if dtype == "bf16" else set())
    assert {row["name"] for row in listed["groups"]["default"]["state"]} == {f"{p}/{k}" for p in paths for k in keys}
    resumed = trained(document(tmp_path / "resumed", world, sections, recipe), resume_from=str(straight.checkpoint(3)))
    assert [row["step"] for row in resumed.steps] == [4, 5, 6]
    same_end(straight, resumed, 6)


def inspected(checkpoint: Path) -> dict[str, Any]:
    """What inspect-ckpt --json says, as a program."""
    with started(shardrun("inspect-ckpt", checkpoint, "--json"), checkpoint.parents[1]) as running:
        assert running.wait() == 0
        found: dict[str, Any] = json.loads(running.stdout)
        return found


# ---- schedule ------------------------------------------------------------------------------------------------------


def lr_column(done: Trained) -> list[float]:
    return [row["lr"] for row in done.steps]


def test_c014_c015_the_rate_follows_the_updates_whatever_stops_and_ranks(tmp_path: Path) -> None:
    def config(name: str, world: int) -> dict[str, Any]:
        train = {"steps": 10, "global_batch_size": 2}
        return document(tmp_path / name, world, {**FALLING, "train": train}, samples=[[1.0]] * 20)

    straight = lr_column(trained(config("one", 1)))
    assert straight == pytest.approx([0.1 * (1 - k / 10) for k in range(10)])
    assert trained(config("broken", 1), stop_at=4).steps[-1]["step"] == 4
    broken = lr_column(trained(config("broken", 1)))
    assert broken == straight
    assert broken[4] == pytest.approx(0.06)
    # C015: not stepped once per process.
    two = lr_column(trained(config("two", 2)))
    assert two == straight
    assert two[9] == pytest.approx(0.01)


def test_c016_a_finished_run_stays_as_it_is(tmp_path: Path) -> None:
    config = document(tmp_path / "run", 1, {"train": {"steps": 5}}, samples=[[1.0]] * 3)
    assert program(tmp_path, config)[0] == 0
    before = contents(tmp_path / "run")
    for _ in range(2):
        code, said = program(tmp_path, config)
        assert code == 0
        assert "already finished at step 5: nothing to do" in said
        assert contents(tmp_path / "run") == before


def contents(run_dir: Path) -> dict[str, tuple[str, int]]:
    """Hash and time of every file of a run but its lock."""
    files = [path for path in run_dir.rglob("*") if path.is_file() and "lock" not in path.name.lower()]
    assert any(path.name == "manifest.json" for path in files)
    return {str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}


def test_c018_accumulation_does_not_hurry_the_schedule(tmp_path: Path) -> None:
    config = document(
        tmp_path / "run",
        2,
        {**FALLING, "train": {"steps": 2, "global_batch_size": 8}},  # 4 micro-batches on each rank
        samples=[[1.0]] * 16,
    )
    first = trained(config, stop_at=1)
    manifest = json.loads((first.checkpoint(1) / "manifest.json").read_text())
    assert manifest["schedule"]["position"] == 1
    assert lr_column(trained(config)) == pytest.approx([0.10, 0.09])


# ---- data and random numbers ---------------------------------------------------------------------------------------


def test_c021_a_resume_in_a_later_epoch_goes_on_with_its_order(tmp_path: Path) -> None:
    def config(name: str) -> dict[str, Any]:
        sections = {"train": {"steps": None, "epochs": 3, "global_batch_size": 2}, "data": {"shuffle": True}}
        samples = [[float(x)] for x in range(12)]
        return document(tmp_path / name, 2, sections, samples=samples, record=str(tmp_path / f"{name}.seen"))

    assert len(trained(config("straight")).steps) == 18
    assert trained(config("broken"), stop_at=9).steps[-1]["epoch"] == 2
    trained(config("broken"))
    for rank in range(2):
        seen = recorded(tmp_path / "straight.seen", rank)
        assert seen == recorded(tmp_path / "broken.seen", rank)
        epochs = [[line["x"] for line in seen[begin : begin + 6]] for begin in (0, 6, 12)]
        assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("at", [6, 8])
def test_c022_random_numbers_survive_a_save_on_the_epochs_end_and_inside(tmp_path: Path, at: int) -> None:
    recipe = str(RECIPES / "verify_net.py")

    def config(name: str) -> dict[str, Any]:
        train = {"steps": 12, "micro_batch_size": 2, "global_batch_size": 4}
        sections = {"optimizer": ADAMW, "train": train, "data": {"shuffle": True}}
        return document(tmp_path / name, 2, sections, recipe, samples=24, dropout=0.5)

    straight = trained(config("straight"))
    trained(config("broken"), stop_at=at)
    same_end(straight, trained(config("broken")), 12)


def test_c022_verify_resume_says_so(tmp_path: Path) -> None:
    train = {"steps": 12, "micro_batch_size": 2, "global_batch_size": 4}
    sections = {"optimizer": ADAMW, "train": train, "data": {"shuffle": True}}
    recipe = str(RECIPES / "verify_net.py")
    settings = from_mapping(document(tmp_path / "run", 2, sections, recipe, samples=24, dropout=0.5))
    verdict = Verification(settings, tmp_path / "scratch", Silent(), start=forked).run()
    assert verdict.first is None, verdict.first
    assert (verdict.plan.stops, verdict.plan.windows_per_epoch) == ((4, 8), 6)


def test_c023_no_later_epoch_loses_its_first_batches(tmp_path: Path) -> None:
    sections = {"train": {"steps": None, "epochs": 3, "global_batch_size": 2}, "data": {"shuffle": True}}
    samples = [[float(x)] for x in range(20)]  # 10 batches in an epoch
    config = document(tmp_path / "run", 2, sections, samples=samples, record=str(tmp_path / "seen"))
    trained(config, stop_at=4)
    trained(config)
    seen = Counter(x for rank in range(2) for line in recorded(tmp_path / "seen", rank) for x in line["x"])
    assert seen == {float(x): 3 for x in range(20)}


def test_c025_each_rank_goes_on_with_random_numbers_of_its_own(tmp_path: Path) -> None:
    def config(name: str) -> dict[str, Any]:
        sections = {"train": {"steps": 6}}
        record = str(tmp_path / f"{name}.seen")
        return document(tmp_path / name, 2, sections, samples=[[1.0]] * 12, noise=True, record=record)

    straight = trained(config("straight"))
    trained(config("broken"), stop_at=3)
    same_end(straight, trained(config("broken")), 6)
    draws = [[line["draws"] for line in recorded(tmp_path / "straight.seen", rank)] for rank in range(2)]
    assert draws == [[line["draws"] for line in recorded(tmp_path / "broken.seen", rank)] for rank in range(2)]
    assert [len(step) for step in draws[1]] == [6] * 6  # two from each of python, numpy and torch
    for one, two in zip(*draws, strict=True):
        assert not set(one) & set(two)


# ---- frozen weights ------------------------------------------------------------------------------------------------


def test_c034_frozen_weights_come_from_the_checkpoint(tmp_path: Path) -> None:
    """The resuming process builds its model from another seed, with other frozen values."""
    recipe = str(RECIPES / "resume_frozen.py")

    def config(name: str) -> dict[str, Any]:
        sections = {"optimizer": ADAMW, "train": {"steps": 4, "global_batch_size": 4}}
        return document(tmp_path / name, 2, sections, recipe)

    straight = trained(config("straight"))
    trained(config("broken"), stop_at=2)
    assert program(tmp_path, config("broken"), env={"CASE_C034_SEED": "77"})[0] == 0
    broken = Trained([], [], [], tmp_path / "broken", read_rows(tmp_path / "broken" / "metrics.jsonl"))
    frozen = broken.model(4)["layers.0.weight"]
    assert torch.equal(frozen, torch.full_like(frozen, 0.25))
    assert {name.rpartition("/")[0] for name in broken.state(4)} == {"layers.1.weight"}
    assert broken.steps[3]["loss"] == straight.steps[3]["loss"]
    same_end(straight, broken, 4)
