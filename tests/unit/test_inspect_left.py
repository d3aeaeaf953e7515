"""inspect-ckpt on damage: which files are good, which tensors are still whole; and on files without a manifest."""

from __future__ import annotations

import math
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from shardrun.checkpoint.inspect import inspect
from shardrun.checkpoint.manifest import MANIFEST
from shardrun.cli import inspect_ckpt
from shardrun.records.header import TensorBytes, read_header, write_safetensors
from tests.golden import state
from tests.golden.runs import flip, put

GOLDEN = Path(__file__).parents[1] / "golden" / "format-1" / "checkpoints" / "step-0000000003"
RECORDS = [f"zero2/default/rank-0000{rank}-of-00002.safetensors" for rank in range(2)]


def copied(tmp_path: Path) -> Path:
    """A checkpoint of two ranks."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "run" / "checkpoints" / GOLDEN.name))


def left(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {row["name"]: row["left"] for row in rows}


def test_of_a_cut_file_the_tensors_before_the_cut_are_there_unverified(tmp_path: Path) -> None:
    path = copied(tmp_path)
    bad = path / "model.safetensors"
    entries = read_header(bad).tensors
    cut = entries["frozen.weight"].start + 1
    os.truncate(bad, cut)
    found = inspect(path)
    wanted = {name: "unverified" if entry.stop <= cut else "lost" for name, entry in entries.items()}
    assert set(wanted.values()) == {"unverified", "lost"}
    assert left(found["model"]) == {**wanted, "head.weight": wanted["emb.weight"]}
    assert set(left(found["groups"]["default"]["state"]).values()) == {"whole"}
    assert found["left"]["bad_files"] == ["model.safetensors"]
    assert sorted(found["left"]["good_files"]) == sorted(
        file["path"] for file in found["files"] if file["path"] != "model.safetensors"
    )
    assert found["left"]["tensors"]["lost"] == list(wanted.values()).count("lost")


@pytest.mark.parametrize("gone", [0, 1])
def test_without_one_ranks_record_what_the_other_holds_is_whole(tmp_path: Path, gone: int) -> None:
    path = copied(tmp_path)
    other = read_header(path / RECORDS[1 - gone]).tensors
    (path / RECORDS[gone]).unlink()
    found = inspect(path, stats=True)
    assert found["problems"] == [f"{path / RECORDS[gone]}: is missing"]
    group = found["groups"]["default"]
    state_left = left(group["state"])
    assert state_left.keys() == other.keys()
    # half.weight and emb.weight are cut between the two; each small one is on one of them alone.
    cut = {name for name in other if name.startswith(("emb.weight/exp", "half.weight/exp", "half.weight/master"))}
    assert {name for name, how in state_left.items() if how == "partly"} == cut
    assert {name for name, how in state_left.items() if how == "whole"} == other.keys() - cut
    held_there = {name.rpartition("/")[0] for name in other}
    assert group["lost"] == sorted(set(state.TRAINABLE) - held_there)
    assert all(("stats" in row) == (row["left"] == "whole") for row in group["state"])
    assert found["left"]["tensors"]["lost"] == len(group["lost"])


def test_what_stands_in_a_file_with_a_flipped_bit_is_unverified(tmp_path: Path) -> None:
    path = copied(tmp_path)
    flip(path / RECORDS[1], 8 * (path / RECORDS[1]).stat().st_size - 1)
    found = inspect(path, verify=True)
    held = left(found["groups"]["default"]["state"])
    assert (held["blocks.0.weight/exp_avg"], held["blocks.1.weight/exp_avg"]) == ("whole", "unverified")
    assert held["half.weight/master"] == "unverified"  # half of it stands there
    assert set(left(found["model"]).values()) == {"whole"}


def test_the_screen_says_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copied(tmp_path)
    (path / RECORDS[1]).unlink()
    assert inspect_ckpt.run(path) == 3
    shown = capsys.readouterr()
    assert f"damaged:\n  {path / RECORDS[1]}: is missing" in shown.err
    assert "what is left: 4 of 5 files; of the tensors" in shown.out
    assert "nothing is left of the state of blocks.1.weight" in shown.out


def test_without_a_manifest_every_files_tensors_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copied(tmp_path)
    (path / MANIFEST).unlink()
    found = inspect(path, stats=True)
    held = [row for row in found["tensors"] if row["file"] == "model.safetensors"]
    assert {row["name"] for row in held} == set(state.parameters())
    assert all(row["left"] == "whole" and row["stats"] for row in held)
    assert inspect_ckpt.run(path) == 3
    shown = capsys.readouterr().out
    assert "without a sound manifest" in shown
    assert RECORDS[0] in shown


def test_a_single_file_and_a_link_to_it_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = tmp_path / "linked.safetensors"
    link.symlink_to(GOLDEN / "model.safetensors")
    found = inspect(link)
    assert (found["kind"], found["good"], len(found["tensors"])) == ("files", True, 7)
    assert found["files"][0]["metadata"] == {"format": "pt", "run": "golden", "step": "3"}
    assert inspect_ckpt.run(link, stats=True) == 0
    (shown,) = [line for line in capsys.readouterr().out.splitlines() if "half.weight" in line]
    assert shown.split()[1:6] == ["half.weight", "bfloat16", "(300,", "3)", "1,800"]


def test_the_screen_says_where_numbers_are_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = struct.pack("<6f", 1, 2, math.inf, 4, math.nan, 0)
    write_safetensors(tmp_path / "w", {"w": TensorBytes("F32", (2, 3), lambda: raw)}, {}, fsync=False)
    assert inspect_ckpt.run(tmp_path / "w", stats=True) == 0
    shown = capsys.readouterr().out
    assert "w: 2 of 6 elements are not finite, the first at [0, 2]" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("└─ w")]
    assert line.split()[-6:] == ["4.583", "0", "4", "16.7", "%", "2"]


def test_names_that_a_terminal_would_obey_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["\x1b[2Jw", "a.\nfake: good", "\u202etfel"]
    tensors = {name: TensorBytes("U8", (1,), lambda: b"\x01") for name in names}
    write_safetensors(tmp_path / "odd.safetensors", tensors, {"by": "\x1b]0;title\x07"}, fsync=False)
    write_safetensors(tmp_path / "none.safetensors", {}, {}, fsync=False)
    assert inspect_ckpt.run(tmp_path / "odd.safetensors", stats=True) == 0
    assert inspect_ckpt.run(tmp_path / "odd.safetensors", other=tmp_path / "none.safetensors") == 4
    shown = capsys.readouterr().out
    assert all(line.isprintable() for line in shown.split("\n"))
    assert "\\x1b[2Jw" in shown
    assert not any(line.startswith("fake") for line in shown.splitlines())


@pytest.mark.parametrize("size", [0, 5, 60, 4000])
def test_a_single_file_that_was_cut_is_damaged(tmp_path: Path, size: int) -> None:
    file = tmp_path / "cut.safetensors"
    shutil.copy(GOLDEN / "model.safetensors", file)
    os.truncate(file, size)
    found = inspect(file)
    assert not found["good"]
    assert str(file) in found["problems"][0]
    assert {row["left"] for row in found["tensors"]} == ({"unverified"} if size == 4000 else set())


def test_a_folder_of_plain_files_is_shown_whole(tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copy(GOLDEN / "model.safetensors", tmp_path / f"{name}.safetensors")
    found = inspect(tmp_path)
    assert [file["path"] for file in found["files"]] == ["a.safetensors", "b.safetensors"]
    assert len(found["tensors"]) == 14


def test_a_run_folder_says_what_came_after_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path, 2)
    os.truncate(put(tmp_path, 5) / "model.safetensors", 100)
    found = inspect(tmp_path)
    assert [(row["run"], row["world_size"]) for row in found["checkpoints"]] == [("golden", 1)] * 2
    assert inspect_ckpt.run(tmp_path) == 3
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].startswith(f"run folder {tmp_path}: 2 checkpoints, ")
    states = {line.split()[0]: line.split()[-1] for line in rows if line.startswith("step-")}
    assert states == {"step-0000000005": "damaged", "step-0000000002": "complete"}
