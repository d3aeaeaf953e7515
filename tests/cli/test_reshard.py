"""`shardrun reshard` and `train --reshard` as a user meets them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardrun.checkpoint.manifest import read_manifest
from shardrun.checkpoint.store import scan
from shardrun.cli import train
from shardrun.cli.app import app
from shardrun.errors import UsageError
from tests.golden.runs import put
from tests.support.launching import Program, shardrun, started, write_config


def ended(config: Path, *words: str) -> tuple[int, Program]:
    with started(shardrun("train", config, *words), config.parent) as program:
        return program.wait(120), program


def test_a_run_goes_on_at_another_world_size_when_that_is_asked_for(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert ended(config, "--stop-at", "2")[0] == 75
    one = "topology.world_size=1"
    with pytest.raises(UsageError, match=r"topology.world_size: saved 2, now 1") as refused:
        train.run(config, [one], accept_changes=True)
    assert "go on at the other world size: --reshard, or first `shardrun reshard` and then" in str(refused.value)
    done = CliRunner().invoke(app, ["reshard", str(tmp_path / "run"), "--world", "1", "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == f"{tmp_path}/run/checkpoints/step-0000000002: step 2, resharded from 2 to 1 ranks"
    assert lines[2].startswith("exact, bit for bit: parameters, optimizer state, counters, position in the data.")
    assert lines[3] == f"go on from it: shardrun train CONFIG {one} --resume-from {tmp_path}/out"
    # What was asked for has to be asked for again, until there is a checkpoint of this start.
    failing = ["recipe_args.fault=raise", "recipe_args.rank=0", "recipe_args.at=1"]
    code, program = ended(config, one, "--reshard", "--accept-changes", *failing)
    assert code == 1
    assert re.search(r"^ *(go on with|start again): .* --accept-changes --reshard$", program.stderr, re.MULTILINE)
    code, program = ended(config, one, "--reshard")
    assert code == 0, program.stderr
    assert "was resharded from 2 to 1 ranks; exact, bit for bit: parameters, optimizer state" in program.stdout
    assert "resumed at step 2" in program.stdout
    worlds = [read_manifest(found.path)[0]["topology"]["world_size"] for found in scan(tmp_path / "run")]
    assert worlds == [1, 2]


def test_what_cannot_be_resharded_is_an_error_with_its_code(tmp_path: Path) -> None:
    source = put(tmp_path)
    (tmp_path / "empty").mkdir()
    (source / "model.safetensors").write_bytes(b"")
    for words, code, told in (
        ([str(tmp_path / "empty"), "--world", "2"], 3, "holds no checkpoint; nothing to reshard"),
        ([str(tmp_path), "--world", "2"], 3, "model.safetensors: .* bytes expected, 0 found"),
        ([str(source), "--world", "0"], 2, "Invalid value for '--world'"),
    ):
        done = CliRunner().invoke(app, ["reshard", *words, "-o", str(tmp_path / "out")])
        assert done.exit_code == code, done.output
        assert re.search(told, done.stderr), done.stderr
    assert not (tmp_path / "out").exists()


def test_a_path_that_the_system_refuses_is_an_error_with_its_code(tmp_path: Path) -> None:
    (loop := tmp_path / "loop").symlink_to("loop")
    done = CliRunner().invoke(app, ["inspect-ckpt", str(loop), "--json"])
    assert (done.exit_code, done.stderr) == (5, f"error: {loop}/checkpoints: Too many levels of symbolic links\n")
    assert '"exit_code": 5' in done.stdout
