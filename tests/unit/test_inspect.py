"""inspect-ckpt: what it shows, what it finds, and that it needs no torch for it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardrun.checkpoint.assemble import Piece, Whole
from shardrun.checkpoint.inspect import inspect
from shardrun.checkpoint.manifest import MANIFEST
from shardrun.checkpoint.store import CHECKPOINTS
from shardrun.cli import inspect_ckpt
from shardrun.cli.app import app
from shardrun.cli.inspect_view import age, size
from shardrun.errors import CheckpointError
from shardrun.records.header import Entry
from shardrun.records.tensors import host_bytes
from tests.golden import state
from tests.golden.runs import RECORD, flip, put

STATE = "state/rank-00000-of-00001.safetensors"


def rows(found: list[dict[str, Any]], key: str) -> dict[str, dict[str, Any]]:
    return {row[key]: row for row in found}


def test_a_run_folder_lists_its_checkpoints_newest_first(tmp_path: Path) -> None:
    put(tmp_path, 2)
    path = put(tmp_path, 5)
    (tmp_path / CHECKPOINTS / ".staging" / "step-0000000006.1.x").mkdir()
    found = inspect(tmp_path, verify=True)
    assert (found["kind"], found["good"], found["newest"]) == ("run", True, "step-0000000005")
    assert [(row["step"], row["sequence"], row["good"]) for row in found["checkpoints"]] == [(5, 2, True), (2, 1, True)]
    assert found["checkpoints"][0]["bytes"] == sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    assert 0 <= found["checkpoints"][0]["age_s"] < 600
    assert found["leftovers"] == [str(tmp_path / CHECKPOINTS / ".staging" / "step-0000000006.1.x")]


def test_one_checkpoint_shows_model_contract_slices_and_hashes(tmp_path: Path) -> None:
    path = put(tmp_path, 3)
    found = inspect(path)
    assert (found["kind"], found["step"], found["good"], found["problems"]) == ("checkpoint", 3, True, [])
    assert found["counters"] == {"tokens": 300, "updates": 3}
    assert found["topology"] == {"world_size": 1}
    model = rows(found["model"], "name")
    assert model["head.weight"] == {
        "name": "head.weight", "dtype": "float32", "shape": [30, 20], "alias_of": "emb.weight", "bytes": 0,
        "held_by": [], "left": "whole",
    }  # fmt: skip
    assert sum(row["bytes"] for row in model.values()) == sum(t.nbytes for t in state.parameters().values())
    wanted = hashlib.sha256(bytes(host_bytes(state.parameters(3)["half.weight"]))).hexdigest()
    assert (model["half.weight"]["dtype"], model["half.weight"]["sha256"]) == ("bfloat16", wanted)
    assert model["frozen.empty"]["shape"] == [0, 4]
    group = found["groups"]["default"]
    parameters = rows(group["parameters"], "path")
    assert parameters["head.weight"]["alias_of"] == "emb.weight"
    assert [parameters[p]["trainable"] for p in ("frozen.weight", "emb.weight")] == [False, True]
    assert group["slices"][0]["fragments"]["half.weight"] == [0, 900]
    tensors = rows(group["state"], "name")
    assert tensors.keys() == state.optimizer_state().keys()
    assert tensors["half.weight/master"]["shape"] == [300, 3]
    assert tensors["half.weight/master"]["held_by"] == [{"rank": 0, "start": 0, "stop": 900}]
    assert tensors["half.weight/step"]["shape"] == []
    wanted = hashlib.sha256(bytes(host_bytes(state.optimizer_state(3)["half.weight/master"]))).hexdigest()
    assert tensors["half.weight/master"]["sha256"] == wanted
    assert {file["status"] for file in found["files"]} == {"present"}
    assert {file["status"] for file in inspect(path, verify=True)["files"]} == {"good"}


def test_hashes_of_large_checkpoints_are_only_taken_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, 3)
    monkeypatch.setattr("shardrun.checkpoint.inspect.HASHED_UNASKED", 100)
    assert all("sha256" not in row for row in inspect(path)["model"])
    assert "sha256" in rows(inspect(path, verify=True)["model"], "name")["emb.weight"]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("how", ["cut", "header", "empty", "missing", "extra", "link"])
def test_a_bad_file_is_named_and_the_others_are_shown(tmp_path: Path, how: str, verify: bool) -> None:
    path = put(tmp_path, 3)
    bad = path / RECORD
    match how:
        case "cut":
            os.truncate(bad, bad.stat().st_size - 4)
        case "header":
            flip(bad, 70)
        case "empty":
            os.truncate(bad, 0)
        case "missing":
            bad.unlink()
        case "extra":
            bad = path / "state" / "other"
            bad.touch()
        case "link":
            (tmp_path / "moved").write_bytes(bad.read_bytes())
            bad.unlink()
            bad.symlink_to(tmp_path / "moved")
    found = inspect(path, verify=verify)
    assert not found["good"]
    assert all(str(bad) in line for line in found["problems"])
    good = "good" if verify else "present"
    files = rows(found["files"], "path")
    assert (files["model.safetensors"]["status"], files[STATE]["status"]) == (good, good)
    assert len(found["model"]) == 8
    assert found["counters"]["tokens"] == 300
    run = inspect(tmp_path, verify=True)
    assert not run["good"]
    assert str(bad) in run["checkpoints"][0]["problems"][0]


def test_a_flipped_bit_in_the_data_is_found_by_verify(tmp_path: Path) -> None:
    bad = put(tmp_path, 3) / RECORD
    flip(bad, 8 * bad.stat().st_size - 1)
    assert inspect(tmp_path)["good"]
    found = inspect(tmp_path, verify=True)
    assert not found["good"]
    assert f"{bad}: blake3:" in found["checkpoints"][0]["problems"][0]
    files = rows(inspect(bad.parents[2], verify=True)["files"], "path")
    assert [files[name]["status"] for name in (RECORD, STATE, "model.safetensors")] == ["bad", "good", "good"]


@pytest.mark.parametrize("how", ["missing", "empty", "flipped"])
def test_without_a_manifest_what_is_left_is_shown(tmp_path: Path, how: str) -> None:
    path = put(tmp_path, 3)
    if how == "missing":
        (path / MANIFEST).unlink()
    elif how == "empty":
        os.truncate(path / MANIFEST, 0)
    else:
        flip(path / MANIFEST, 800)
    os.truncate(path / RECORD, 30)
    found = inspect(path, verify=True)
    assert (found["good"], found["step"]) == (False, 3)
    assert str(path / MANIFEST) in found["problems"][0]
    assert str(path / RECORD) in found["problems"][1]
    files = rows(found["files"], "path")
    assert files["model.safetensors"]["tensors"] == 7
    assert files[RECORD]["status"] == "bad"


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_where_there_is_no_checkpoint_it_says_so(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError) as caught:
        inspect(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_pieces_that_are_not_the_whole_are_told() -> None:
    def whole(*held: tuple[int, int], dtype: str = "F32") -> Whole:
        pieces = [Piece(a, b, rank, "f", Entry(dtype, (b - a,), 0, 4 * (b - a))) for rank, (a, b) in enumerate(held)]
        return Whole("w/exp_avg", "F32", (10,), pieces)

    assert whole((0, 4), (4, 10)).gaps() == []
    assert whole((0, 4), (5, 10)).gaps() == ["state w/exp_avg: elements [4, 5) of 10 are missing"]
    assert whole((0, 4), (3, 10)).gaps() == ["state w/exp_avg: elements [3, 4) of 10 are held twice"]
    assert whole((0, 4)).gaps() == ["state w/exp_avg: elements [4, 10) of 10 are missing"]
    assert len(whole((0, 10), dtype="BF16").gaps()) == 1


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_screen_shows_what_matters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = put(tmp_path, 3)
    assert inspect_ckpt.run(path, verify=True) == 0
    shown = capsys.readouterr().out
    for words in (
        "step 3",
        "tokens 300",
        "alias of emb.weight",
        "├─ half.weight                4 tensors   10,804",
        "│  ├─ master         float32  (300, 3)     3,600  rank 0 [0, 900)",
        "groups [(betas [0.9, 0.999], weight_decay 0.01)], masters True, name adamw",
        "frozen",
        RECORD,
        "good",
    ):
        assert words in shown
    assert inspect_ckpt.run(tmp_path) == 0
    assert "step-0000000003" in capsys.readouterr().out


def test_damage_exits_with_3_and_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = put(tmp_path, 3)
    os.truncate(path / RECORD, 10)
    for target, as_json in ((path, False), (tmp_path, False), (path, True), (tmp_path, True)):
        assert inspect_ckpt.run(target, verify=True, json=as_json) == 3
        shown = capsys.readouterr()
        assert str(path / RECORD) in (shown.out if as_json else shown.err)
        if as_json:
            assert json.loads(shown.out)["good"] is False
            assert shown.err == ""


def test_json_is_one_document_with_a_schema_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = put(tmp_path, 3)
    assert inspect_ckpt.run(path, json=True) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["schema_version"] == 1
    assert shown["groups"]["default"]["state"][0]["name"] == "blocks.0.weight/exp_avg"


def test_torch_is_not_imported(tmp_path: Path) -> None:
    path = put(tmp_path, 3)
    code = (
        "import sys; from pathlib import Path; from shardrun.cli import inspect_ckpt; "
        "codes = [inspect_ckpt.run(Path(p), verify=True, stats='step-' in p) for p in sys.argv[1:]]; "
        "sys.exit(9 if 'torch' in sys.modules else sum(codes))"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path), str(tmp_path)], capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (24_806, "24.8 KB"), (5 * 10**9, "5.0 GB"), (10**13, "10.0 TB")],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(None, "?"), (3, "3 s"), (61, "1 min"), (7200, "2 h"), (200_000, "2 d")])
def test_ages_for_people(seconds: int | None, text: str) -> None:
    assert age(seconds) == text


def test_the_options_reach_the_command(tmp_path: Path) -> None:
    one, other = put(tmp_path, 2), put(tmp_path, 3)
    for words, code, kind in (
        (["--verify", "--stats"], 0, "checkpoint"),
        (["--diff", str(other)], 4, "diff"),
        (["--diff", str(tmp_path / "no")], 3, None),
        ([str(one), "--diff", str(one), "--stats"], 2, None),
        ([str(tmp_path), "--verify"], 0, "run"),
        ([str(tmp_path), "--stats"], 2, None),
    ):
        path = [] if Path(words[0]).is_dir() else [str(one)]
        ended = CliRunner().invoke(app, ["inspect-ckpt", *path, *words, "--json"])
        assert ended.exit_code == code, ended.output
        assert json.loads(ended.stdout).get("kind") == kind
