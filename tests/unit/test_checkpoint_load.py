"""Loading in a world of one: damage is named, misfits are listed, and nothing is taken silently."""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from shardrun.checkpoint.inspect import inspect
from shardrun.checkpoint.load import load
from shardrun.checkpoint.manifest import MANIFEST
from shardrun.checkpoint.store import CHECKPOINTS, LATEST
from shardrun.comm.communicator import Communicator
from shardrun.errors import CheckpointError
from shardrun.records.header import regular_file
from shardrun.records.tensors import fresh_tensor
from tests.golden import state
from tests.golden.runs import RECORD, flip, put, require_newest, visible

COMM = Communicator.single()
STATE = "state/rank-00000-of-00001.safetensors"


def test_nothing_to_load_is_none_or_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        assert load(path, COMM, {}) is None
        with pytest.raises(CheckpointError, match="nothing to resume from") as caught:
            load(path, COMM, {}, required=True)
        assert str(path) in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_run_folder_its_checkpoints_one_of_them_and_a_copy_can_be_named(tmp_path: Path) -> None:
    first = put(tmp_path, 1)
    put(tmp_path, 2)
    require_newest(tmp_path, 2)
    require_newest(tmp_path / CHECKPOINTS, 2)
    require_newest(first, 1)
    require_newest(shutil.copytree(first, tmp_path / "best so far"), 1)
    (tmp_path / "link").symlink_to(first)
    require_newest(tmp_path / "link", 1)


def damage(path: Path, how: str) -> None:
    match how:
        case "cut by 4 bytes":
            os.truncate(path, path.stat().st_size - 4)
        case "cut in the header":
            os.truncate(path, 40)
        case "empty":
            os.truncate(path, 0)
        case "longer":
            with path.open("ab") as file:
                file.write(b"\0")
        case "missing":
            path.unlink()
        case "link":
            shutil.copy(path, path.parents[-3] / "elsewhere")
            path.unlink()
            path.symlink_to(path.parents[-3] / "elsewhere")
        case "first bit":
            flip(path, 0)
        case "last bit":
            flip(path, path.stat().st_size * 8 - 1)
        case "folder":
            path.unlink()
            path.mkdir()


HOW = ["cut by 4 bytes", "cut in the header", "empty", "longer", "missing", "link", "first bit", "last bit", "folder"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("relative", ["model.safetensors", RECORD, STATE, MANIFEST])
def test_damage_is_named_and_the_older_one_is_taken_only_if_asked(tmp_path: Path, relative: str, how: str) -> None:
    put(tmp_path, 1)
    path = put(tmp_path, 2)
    damage(path / relative, how)
    with pytest.raises(CheckpointError, match="is damaged") as caught:
        load(tmp_path, COMM, state.expected())
    assert str(path / relative) in str(caught.value)
    assert "--allow-fallback takes it" in str(caught.value)
    notes = require_newest(tmp_path, 1, allow_fallback=True)
    assert str(path / relative) in notes[0]
    assert notes[1] == f"went back to {tmp_path / CHECKPOINTS / 'step-0000000001'}"
    with pytest.raises(CheckpointError) as caught:
        load(path, COMM, state.expected(), allow_fallback=True)
    assert "--allow-fallback" not in str(caught.value)


def test_sizes_expected_and_found_are_told(tmp_path: Path) -> None:
    path = put(tmp_path, 1) / RECORD
    size = path.stat().st_size
    damage(path, "cut by 4 bytes")
    with pytest.raises(CheckpointError, match=f"{size:,} bytes expected, {size - 4:,} found"):
        load(tmp_path, COMM, {})


def test_one_flipped_bit_anywhere_names_the_file(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    files = sorted(one for one in path.rglob("*") if one.is_file())
    assert len(files) == 4
    choose = random.Random(5)
    for file in files:
        for bit in choose.sample(range(file.stat().st_size * 8), 25):
            flip(file, bit)
            with pytest.raises(CheckpointError) as caught:
                load(tmp_path, COMM, state.expected())
            assert str(file) in str(caught.value)
            flip(file, bit)
    require_newest(tmp_path, 1)


def test_an_unregistered_file_is_refused(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    (path / "zero2" / "extra.safetensors").write_text("x")
    with pytest.raises(CheckpointError, match=r"extra.safetensors: is not in the manifest"):
        load(tmp_path, COMM, state.expected())


def test_files_swapped_between_checkpoints_are_found(tmp_path: Path) -> None:
    first, second = put(tmp_path, 1), put(tmp_path, 2)
    shutil.copy(first / RECORD, second / RECORD)  # same size, same form, other step
    with pytest.raises(CheckpointError, match=r"blake3:\w+ expected, blake3:\w+ found"):
        load(tmp_path, COMM, state.expected())
    shutil.copy(first / MANIFEST, second / MANIFEST)
    with pytest.raises(CheckpointError, match="is that of step 1"):
        load(tmp_path, COMM, state.expected())


def test_a_folder_that_is_a_link_inside_a_checkpoint_is_refused(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    (path / "state").rename(tmp_path / "outside")
    (path / "state").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        load(tmp_path, COMM, state.expected())


def test_a_file_that_shrinks_while_it_is_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, 1) / "model.safetensors"

    def shrink(entry: Any) -> Any:
        os.truncate(path, path.stat().st_size - 100)
        return fresh_tensor(entry)

    # One file after the other, the model first: tensors of others must not cut it before it is opened.
    monkeypatch.setattr("shardrun.checkpoint.read.ThreadPoolExecutor", partial(ThreadPoolExecutor, 1))
    monkeypatch.setattr("shardrun.checkpoint.read.fresh_tensor", shrink)
    with pytest.raises(CheckpointError, match=r"model.safetensors: ended .* early while being read"):
        load(tmp_path, COMM, state.expected())


def test_a_file_that_the_disk_cannot_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 1)
    path = put(tmp_path, 2) / "model.safetensors"

    def opened(descriptor: int, where: str) -> BinaryIO:
        return BadSector(descriptor) if where == str(path) else regular_file(descriptor, where)

    monkeypatch.setattr("shardrun.checkpoint.safe_files.regular_file", opened)
    told = "model.safetensors: cannot be read: Input/output error"
    with pytest.raises(CheckpointError, match=told):
        load(tmp_path, COMM, state.expected())
    assert told in "".join(require_newest(tmp_path, 1, allow_fallback=True))
    assert [told in line for line in inspect(path.parent)["problems"]] == [True]


class BadSector(io.FileIO):
    """A file whose disk cannot read what follows its first bytes."""

    def readinto(self, buffer: Any) -> int:
        if self.tell() < 8:
            return super().readinto(buffer) or 0
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_all_damaged_are_all_told(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        damage(put(tmp_path, step) / RECORD, "empty")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, COMM, state.expected(), allow_fallback=True)
    assert [f"step-000000000{step} is damaged" in str(caught.value) for step in (1, 2, 3)] == [True] * 3


@pytest.mark.parametrize("content", [b"", b"garbage", b'{"step":9,"dir":"step-0000000009"}'])
def test_a_wrong_pointer_misleads_nobody(tmp_path: Path, content: bytes) -> None:
    put(tmp_path, 1)
    put(tmp_path, 2)
    (tmp_path / CHECKPOINTS / LATEST).write_bytes(content)
    require_newest(tmp_path, 2)
    (tmp_path / CHECKPOINTS / LATEST).unlink()
    require_newest(tmp_path, 2)


def test_all_misfits_come_at_once_and_nothing_older_is_tried(tmp_path: Path) -> None:
    put(tmp_path, 1)
    path = put(tmp_path, 2)
    expected = state.expected()
    expected["model"]["blocks.2.weight"] = ["float32", [9]]
    expected["model"]["temperature"] = ["bfloat16", []]
    expected["groups"]["default"]["optimizer"] = {"name": "sgd"}
    expected["numerics"] = {"torch": "other"}
    before = visible(tmp_path)
    with pytest.raises(CheckpointError, match=f"checkpoint {path} does not fit this run:") as caught:
        load(tmp_path, COMM, expected, allow_fallback=True)
    for line in (
        "model: blocks.2.weight: expected (float32 [9]), not in the checkpoint",
        "model: temperature: dtype saved float32, this run bfloat16",
        "optimizer.name: saved 'adamw', this run 'sgd'",
        "numerics.torch: saved 'any', this run 'other'",
    ):
        assert line in str(caught.value)
    assert visible(tmp_path) == before


def test_loaded_tensors_are_fresh_memory(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    found = load(tmp_path, COMM, state.expected())
    assert found is not None
    found.model["emb.weight"].zero_()
    found.records["default"].tensors["emb.weight/exp_avg"].zero_()
    shutil.rmtree(path)  # nothing of it is mapped
    assert float(found.model["blocks.0.weight"].sum()) == float(state.parameters(1)["blocks.0.weight"].sum())
