"""The committed checkpoints, one of each format, load for ever, and every command takes them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

from shardrun.checkpoint.difference import diff
from shardrun.checkpoint.export import export_safetensors
from shardrun.checkpoint.export_torch import export_torch
from shardrun.checkpoint.inspect import inspect
from shardrun.checkpoint.load import load
from shardrun.checkpoint.manifest import MANIFEST, canonical_json, read_manifest
from shardrun.checkpoint.reshard import reshard
from shardrun.comm.communicator import Communicator
from shardrun.records.header import write_safetensors
from shardrun.records.tensors import host_bytes
from tests.golden import state
from tests.golden.make import STEP, WORLD_SIZE, table
from tests.support.ranks import run_ranks

FOLDERS = [Path(__file__).parents[1] / "golden" / f"format-{version}" for version in (1, 2)]
each_format = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.name))


def checkpoint_in(folder: Path) -> Path:
    return folder / "checkpoints" / "step-0000000003"


def load_golden(comm: Communicator, path: Path) -> list[dict[str, Any]]:
    """[model, optimizer state of this rank, own state] as plain lists, for the parent to put together."""
    expected = {key: value for key, value in state.expected(comm.rank, comm.world_size).items() if key != "groups"}
    found = load(path, comm, expected)
    assert found is not None
    assert found.step == STEP
    record = found.records[state.GROUP]
    pieces = {n: [*record.meta["fragments"][n.rpartition("/")[0]], t.tolist()] for n, t in record.tensors.items()}
    model = {name: hashlib.sha256(bytes(host_bytes(tensor))).hexdigest() for name, tensor in found.model.items()}
    return [model, pieces, {name: tensor.tolist() for name, tensor in found.rank_state.items()}, record.meta]


@each_format
def test_it_loads_with_the_bits_it_was_made_of(folder: Path) -> None:
    answers = run_ranks(WORLD_SIZE, load_golden, folder)
    whole = state.optimizer_state()
    held = dict.fromkeys(whole, 0)
    for rank, (model, pieces, rank_state, meta) in enumerate(answers):
        for name, tensor in state.parameters().items():
            assert model[name] == hashlib.sha256(bytes(host_bytes(tensor))).hexdigest()
        assert model["head.weight"] == model["emb.weight"]
        for name, (start, stop, values) in pieces.items():
            wanted = whole[name] if whole[name].dim() == 0 else whole[name][start:stop]
            assert values == wanted.tolist(), name
            held[name] += stop - start
        assert rank_state == {"rng.torch": list(range(rank, rank + 16)), "position": STEP}
        assert (meta["rank"], meta["world_size"], meta["step_count"], meta["version"]) == (rank, WORLD_SIZE, 3, 1)
    assert {name: count for name, count in held.items() if whole[name].dim()} == {
        name: tensor.numel() for name, tensor in whole.items() if tensor.dim()
    }


@each_format
def test_it_is_shown_as_it_was_when_it_was_written(folder: Path) -> None:
    found = inspect(checkpoint_in(folder), verify=True)
    assert found["problems"] == []
    assert table(checkpoint_in(folder)) == json.loads((folder / "tensors.json").read_text())
    assert found["counters"] == {"tokens": 300, "updates": 3}
    assert {one["hash"].partition(":")[0] for one in found["files"]} == {"sha256" if folder == FOLDERS[0] else "blake3"}


@each_format
def test_one_flipped_bit_is_found_in_any_file(folder: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(checkpoint_in(folder), tmp_path / "step-0000000003")
    for entry in read_manifest(checkpoint)[0]["files"]:
        file = checkpoint / entry["path"]
        raw = file.read_bytes()
        file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        (problem,) = inspect(checkpoint, verify=True)["problems"]
        assert problem.startswith(f"{file}: {entry['hash']} expected")
        file.write_bytes(raw)


def without_own_state(checkpoint: Path, copy: Path) -> Path:
    """A copy in the same format, whose ranks have no state of their own: no reshard takes that of the golden one."""
    shutil.copytree(checkpoint, copy)
    manifest = json.loads((copy / MANIFEST).read_text())
    del manifest["digest"]
    for entry in manifest["files"]:
        if entry["role"] == "state":
            (copy / entry["path"]).unlink()
            entry["bytes"] = write_safetensors(copy / entry["path"], {}, {}).bytes
            raw = (copy / entry["path"]).read_bytes()
            version_1 = {"sha256": hashlib.sha256(raw).hexdigest()}
            entry |= version_1 if manifest["version"] == 1 else {"hash": f"blake3:{blake3(raw).hexdigest()}"}
    sealed = {**manifest, "digest": hashlib.sha256(canonical_json(manifest)).hexdigest()}
    (copy / MANIFEST).write_bytes(canonical_json(sealed) + b"\n")
    return copy


@each_format
def test_it_is_resharded_exported_and_found_equal_to_the_other_format(folder: Path, tmp_path: Path) -> None:
    checkpoint = without_own_state(checkpoint_in(folder), tmp_path / "golden")
    three, back = tmp_path / "three", tmp_path / "back"
    reshard(checkpoint, three, 3)
    reshard(three, back, WORLD_SIZE)
    assert inspect(three, verify=True)["problems"] == inspect(back, verify=True)["problems"] == []
    for entry in read_manifest(checkpoint)[0]["files"]:
        assert (back / entry["path"]).read_bytes() == (checkpoint / entry["path"]).read_bytes()
    assert all(
        diff(checkpoint, other)["same"]
        for other in (three, without_own_state(checkpoint_in(FOLDERS[0]), tmp_path / "one"))
    )
    plain = export_safetensors(checkpoint, tmp_path / "plain").path / "model.safetensors"
    assert plain.read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    saved = torch.load(export_torch(checkpoint, tmp_path / "torch").path / "checkpoint.pt", weights_only=True)
    model = state.parameters()
    assert state.same_tensors(saved["model"], {**model, **{alias: model[to] for alias, to in state.TIED.items()}}) == []


@each_format
@pytest.mark.parametrize("name", ["emb.weight/exp_avg", "half.weight/master"])
def test_its_table_is_that_of_the_state(folder: Path, name: str) -> None:
    """The committed hashes against the state itself, so that neither can drift alone."""
    tensor = state.optimizer_state()[name]
    wanted = hashlib.sha256(bytes(host_bytes(tensor.to(torch.float32)))).hexdigest()
    assert json.loads((folder / "tensors.json").read_text())[name][2] == wanted
