"""Muon and a recipe's own optimizer as programs: train, stop, go on, look into, prove."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from shardrun.cli.app import app
from tests.support.launching import ROOT, Program, shardrun, started
from tests.support.verifying import verify_config

MUON = {"name": "muon", "lr": 0.02, "rest": {"name": "adamw", "lr": 0.01}, "options": []}
OWN = {"factory": "Rows", "kind": "matrix", "lr": 0.01}


def config(folder: Path, optimizer: dict[str, Any], world: int) -> Path:
    path = verify_config(folder, topology={"world_size": world})
    recipe = str(ROOT / "tests" / "support" / "recipes" / "own_optimizer.py")
    path.write_text(json.dumps({**json.loads(path.read_text()), "optimizer": optimizer, "recipe": recipe}))
    return path


def ended(folder: Path, *words: object) -> tuple[int, Program]:
    with started(shardrun(*words), folder) as program:
        code = program.wait(170)
        assert program.left(0.5) == {}
        return code, program


def test_muon_trains_stops_goes_on_and_can_be_looked_into(tmp_path: Path) -> None:
    path = config(tmp_path, MUON, 2)
    code, program = ended(tmp_path, "train", path, "--stop-at", "3")
    assert (code, program.stderr) == (75, "")
    lines = program.stdout.splitlines()
    assert "muon + adamw under zero1" in lines
    assert "  muon             2  600    first.weight, second.weight" in lines
    assert "  adamw            2  72     first.bias, second.bias" in lines
    assert [line.split()[:2] for line in lines[lines.index("owners") + 3 :]][:2] == [["rank", "0"], ["rank", "1"]]
    code, program = ended(tmp_path, "train", path)
    assert (code, program.stderr) == (0, "")
    assert f"resumed at step 3 from {tmp_path}/run/checkpoints/step-0000000003" in program.stdout
    code, program = ended(tmp_path, "inspect-ckpt", tmp_path / "run" / "checkpoints" / "step-0000000007", "--verify")
    assert (code, program.stderr) == (0, "")
    assert "strategy zero1" in program.stdout
    rows = [" ".join(line.split()) for line in program.stdout.splitlines()]
    assert any("weight.momentum_buffer float32 (15, 7) 420 rank 0 [0, 105)" in row for row in rows)
    files = {row.split()[0]: row.split() for row in rows if row.startswith("zero1/")}
    assert files["zero1/default/rank-00001-of-00002.safetensors"][3] == "good"


def test_a_resume_of_muon_is_proven(tmp_path: Path) -> None:
    code, program = ended(tmp_path, "verify-resume", config(tmp_path, MUON, 2), "--json")
    assert (code, program.stderr) == (0, "")
    document = json.loads(program.stdout)
    assert (document["verdict"], document["world_size"]) == ("bit-identical", 2)
    compared = {row["what"]: row["values"] for row in document["compared"]}
    # 5 moments; 7 * 15 + 15 * 3 elements of matrices and 15 + 3 of the others, each on the rank that owns it.
    assert (compared["optimizer momentum_buffer"], compared["optimizer exp_avg"]) == (150 * 5, 18 * 5)


def test_an_optimizer_of_the_recipe_says_what_the_check_is_worth(tmp_path: Path) -> None:
    code, program = ended(tmp_path, "train", config(tmp_path, OWN, 1))
    assert (code, program.stderr) == (0, "")
    assert "Rows under zero1" in program.stdout.splitlines()
    assert "optimizer: Rows of the recipe is declared matrix; a few small tensors were stepped" in program.stdout


def test_muon_under_zero2_is_refused_with_the_way_out(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", str(config(tmp_path, MUON, 2)), "optimizer.strategy=zero2"])
    assert result.exit_code == 2
    assert (
        "optimizer.strategy: muon updates whole matrices and cannot run under zero2, which cuts parameters anywhere; "
        "use strategy zero1" in result.stderr
    )
    assert not (tmp_path / "run").exists()
