"""`shardrun verify-resume` as a program: what it says, its exit codes, what it leaves behind."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardrun.cli.app import app
from shardrun.run.metrics import read_rows
from tests.support.launching import Program, final_tensors, shardrun, started
from tests.support.verifying import verify_config


@contextmanager
def verified(folder: Path, config: Path, *words: str) -> Iterator[tuple[int, Program]]:
    """Run it to its end with scratch folders under `folder`; no process may be left."""
    scratch = folder / "scratch"
    scratch.mkdir()
    with started(shardrun("verify-resume", config, *words), folder, {"TMPDIR": str(scratch)}) as program:
        code = program.wait(170)
        assert program.left(0.5) == {}
        yield code, program


def left_behind(folder: Path) -> list[Path]:
    return list((folder / "scratch").glob("shardrun-*"))  # torch may leave a cache of its own there


def test_dropout_two_option_groups_and_accumulation_on_two_ranks_are_bit_identical(tmp_path: Path) -> None:
    config = verify_config(tmp_path, topology={"world_size": 2}, data={"workers": 1})
    with verified(tmp_path, config, "--keep") as (code, program):
        assert (code, program.stderr) == (0, "")
        lines = program.stdout.splitlines()
    assert lines[-1].startswith("bit-identical: stopped at 2 and 5 and resumed in fresh processes")
    assert lines[2].startswith(
        "leg 2: fresh processes, all spoiled, then restored at 2; stopped after window 5, inside"
    )
    table = {line[2:22].strip(): line.split()[-2:] for line in lines if line.endswith("bit-identical")}
    # 5 moments on 2 ranks; 7 * 15 + 15 + 15 * 3 + 3 parameters, 15 + 3 + 1 elements in buffers.
    assert table["parameters"][0] == f"{168 * 10:,}"
    assert table["buffers"][0] == f"{19 * 10:,}"
    assert {"optimizer exp_avg", "optimizer step", "rng torch", "data seen", "metrics"} <= table.keys()
    assert not (tmp_path / "run").exists()  # the run's own folder is not touched
    (kept,) = left_behind(tmp_path)
    assert f"scratch folders: {kept}" in lines
    assert not (kept / "straight" / "checkpoints").exists()
    assert len(read_rows(kept / "straight" / "metrics.jsonl")) == 7 + 3
    # Leg 3 stands on what leg 2 saved, and nothing that was written in the scratch folder of the straight leg.
    steps = sorted(path.name for path in (kept / "interrupted" / "checkpoints").glob("step-*"))
    assert steps == ["step-0000000005", "step-0000000007"]


def test_a_fault_on_one_rank_exits_with_4_and_is_named(tmp_path: Path) -> None:
    config = verify_config(tmp_path, topology={"world_size": 2})
    with verified(tmp_path, config, "--tamper", "parameter", "--json") as (code, program):
        assert (code, program.stderr) == (4, "")
        document = json.loads(program.stdout)
    assert document["schema_version"] == 1
    assert (document["verdict"], document["stopped_early"]) == ("different", True)
    first = document["first_difference"]
    assert (first["what"], first["when"], first["step"], first["rank"]) == ("parameters", "after the restore", 2, 1)
    assert (first["name"], first["element"]) == ("first.weight", 0)
    assert first["straight"] != first["interrupted"]
    assert left_behind(tmp_path) == []


def test_state_that_no_checkpoint_can_hold_is_found_and_hinted_at(tmp_path: Path) -> None:
    """The model counts in a plain attribute: resuming is not exact, and the command must say so."""
    config = verify_config(tmp_path, recipe_args={"fault": "attribute", "dropout": 0.0})
    with verified(tmp_path, config) as (code, program):
        assert code == 4, program.stdout + program.stderr
        (verdict,) = program.stderr.splitlines()
    assert verdict.startswith("NOT identical. First difference: step ")
    assert "(before the stop), rank 0: parameters: first.bias, element 0: " in verdict  # restored, then gone astray
    assert "note: the legs after the difference were not run" in program.stdout
    assert (
        "note: calls, a plain attribute of the model, is 8 in the straight run at step 2 and 0 after" in program.stdout
    )
    assert "bit-identical: " not in program.stdout


def test_a_leg_that_fails_shows_its_cause_and_keeps_its_folder(tmp_path: Path) -> None:
    config = verify_config(tmp_path, recipe_args={"fault": "rank"})
    with verified(tmp_path, config) as (code, program):
        assert code == 1
        lines = program.stderr.splitlines()
    assert lines[0] == "straight failed: rank 0 failed at step 3, phase forward"
    assert "  ValueError: bad label 7" in lines
    assert lines[-1] == "nothing is claimed: the proof did not come to its end"
    (kept,) = left_behind(tmp_path)
    assert lines[1] == f"its folder is kept: {kept / 'straight'}"
    assert "bad label 7" in (kept / "straight" / "logs" / "rank-0.log").read_text()


def test_a_run_that_was_killed_and_resumed_is_proven_from_its_folder(tmp_path: Path) -> None:
    config = verify_config(
        tmp_path,
        topology={"world_size": 2},
        train={"steps": 60},
        checkpoint={"every": 10, "keep": 9},
        recipe_args={"slow_s": 0.01},
    )
    with started(shardrun("train", config), tmp_path) as program:
        program.until("step 25/60")
        program.signal(signal.SIGKILL)
        assert program.wait() == -signal.SIGKILL
    with started(shardrun("train", config), tmp_path) as program:
        assert program.wait(120) == 0
        assert "resumed at step" in program.stdout
    page = tmp_path / "proof.txt"
    before = final_tensors(tmp_path / "run")
    with verified(tmp_path, tmp_path / "run", "--from", "10", "--report", str(page)) as (code, program):
        assert (code, program.stderr) == (0, "")
        last = program.stdout.splitlines()[-1]
    assert last.startswith("bit-identical: the run, which was stopped and resumed at step ")
    assert "is the one that never stopped: the replay went from step 10 to step 60 at one go" in last
    assert final_tensors(tmp_path / "run") == before
    assert left_behind(tmp_path) == []
    said = page.read_text()
    assert "BIT-IDENTICAL" in said
    assert "step-0000000060" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.steps=2"], "a run of 2 windows has no room for two stops"),
        (["--tamper", "gremlin"], "--tamper gremlin: unknown; one of parameter, master,"),
    ],
)
def test_what_cannot_be_proven_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    with verified(tmp_path, verify_config(tmp_path), *words) as (code, program):
        assert code == 2
        assert said in program.stderr


def test_a_target_that_is_not_there_is_told(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["verify-resume", str(tmp_path / "no")])
    assert (done.exit_code, done.stderr) == (
        2,
        f"error: {tmp_path}/no: does not exist; give a config, or the folder of a run\n",
    )


def test_a_config_error_comes_before_anything_is_started(tmp_path: Path) -> None:
    config = verify_config(tmp_path, optimizer={"lr": -1})
    with verified(tmp_path, config) as (code, program):
        assert code == 2
        assert "optimizer.lr" in program.stderr
    assert left_behind(tmp_path) == []


def test_ctrl_c_ends_it_without_a_verdict_and_without_a_trace(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    config = verify_config(tmp_path)
    with started(shardrun("verify-resume", config), tmp_path, {"TMPDIR": str(scratch)}) as program:
        program.until("straight: ")
        program.signal(signal.SIGINT)
        assert program.wait() == 130
        assert program.left(0.5) == {}
    assert "identical" not in program.stdout
    assert left_behind(tmp_path) == []
