"""Manifests that are well sealed and lie, for whoever can write can also seal: refused, or shown, never a crash."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardrun.checkpoint.export import export_safetensors
from shardrun.checkpoint.export_torch import export_torch
from shardrun.checkpoint.import_model import import_model
from shardrun.checkpoint.inspect import inspect
from shardrun.checkpoint.load import load
from shardrun.checkpoint.manifest import MANIFEST, seal
from shardrun.checkpoint.reshard import reshard
from shardrun.checkpoint.store import examine
from shardrun.cli import verify_resume
from shardrun.comm.communicator import Communicator
from shardrun.errors import CheckpointError, UsageError
from tests.golden import state
from tests.golden.runs import RECORD, put

COMM = Communicator.single()
STATE = "state/rank-00000-of-00001.safetensors"


def reseal(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and give it a right digest."""
    manifest = json.loads((path / MANIFEST).read_bytes())
    edit(manifest)
    (path / MANIFEST).write_bytes(seal({key: value for key, value in manifest.items() if key != "digest"}))


def entry(manifest: dict[str, Any], relative: str) -> dict[str, Any]:
    return next(one for one in manifest["files"] if one["path"] == relative)


def drop(relative: str) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest["files"].remove(entry(manifest, relative))


LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "state has the role of a model": (
        lambda m: entry(m, STATE).update(role="model"),
        "lists 0 files for the state of rank 0, not one",
    ),
    "no state": (lambda m: entry(m, STATE).update(role="model"), "lists 0 files for the state of rank 0"),
    "no record": (drop(RECORD), "is not in the manifest"),
    "record of another group": (
        lambda m: (m["groups"].update(other={"contract": []}), entry(m, RECORD).update(group="other")),
        "lists 0 files for the record of group default of rank 0",
    ),
    "model lists another shape": (
        lambda m: m["model"].update(temperature=["float32", [1]]),
        "not those that the manifest lists",
    ),
    "fragment too long": (
        lambda m: entry(m, RECORD)["fragments"].update({"blocks.0.weight": [0, 8]}),
        r"blocks.0.weight/exp_avg: shape \[7\]; the fragment \[0, 8\] has 8",
    ),
    "fragment gone": (
        lambda m: entry(m, RECORD)["fragments"].pop("emb.weight"),
        "this rank holds no fragment of emb.weight",
    ),
    "another hash": (lambda m: entry(m, RECORD).update(hash=f"blake3:{'0' * 64}"), "blake3:0000"),
    "another size": (lambda m: entry(m, RECORD).update(bytes=5), "5 bytes expected"),
    "another step": (lambda m: m.update(step=4), "is that of step 4"),
    "members of the world": (lambda m: m["topology"].update(members=[0]), r"topology.members are \[0\], not ranks"),
    "members that are no ranks": (lambda m: m["topology"].update(members={"default": 0}), "not ranks of groups"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_refused_as_damage_and_inspect_survives_it(tmp_path: Path, name: str) -> None:
    edit, words = LIES[name]
    path = put(tmp_path, 3)
    reseal(path, edit)
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path, COMM, {})
    assert inspect(path, verify=True)["step"] in (3, 4)


def test_inspect_tells_that_a_checkpoint_stands_under_another_step(tmp_path: Path) -> None:
    path = put(tmp_path, 3)
    moved = path.rename(path.with_name("step-0000000007"))
    assert inspect(moved)["problems"] == [f"{moved / MANIFEST}: is that of step 3"]


def test_a_group_that_a_rank_is_no_member_of_needs_no_record_of_it(tmp_path: Path) -> None:
    path = put(tmp_path, 3)
    reseal(path, lambda m: m["groups"].update(experts={"contract": [], "members": [5]}))
    found = load(tmp_path, COMM, {})
    assert found is not None
    assert list(found.records) == ["default"]


def test_folders_without_end_are_refused_and_shown(tmp_path: Path) -> None:
    path = put(tmp_path, 3)
    here = os.getcwd()
    try:
        os.chdir(path)
        for _ in range(sys.getrecursionlimit()):
            os.mkdir("x")
            os.chdir("x")
    finally:
        os.chdir(here)
    with pytest.raises(CheckpointError, match="x/x: is not a regular file"):
        load(tmp_path, COMM, {})
    assert not inspect(path)["good"]
    (path / MANIFEST).unlink()
    assert not inspect(path)["good"]
    subprocess.run(["rm", "-rf", str(path)], check=True)  # pytest would come to its own limits


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.sampled_from([1 << 62, 1 << 64, 0.5, "", "x", "float32", "default", STATE, RECORD, "a" * 64, [], {}, [0, 7]]),
)


def changed(data: st.DataObject, tmp_path: Path) -> Path:
    """A checkpoint whose manifest was changed in one or two places, and sealed."""
    run_dir = tmp_path / "run"
    if not run_dir.exists():
        put(run_dir, 3)
        shutil.copy(run_dir / "checkpoints" / "step-0000000003" / MANIFEST, tmp_path / MANIFEST)
    path = run_dir / "checkpoints" / "step-0000000003"
    shutil.copy(tmp_path / MANIFEST, path / MANIFEST)

    def edit(manifest: dict[str, Any]) -> None:
        for _ in range(data.draw(st.integers(1, 2))):
            every = list(places(manifest))
            container, key = every[data.draw(st.integers(0, len(every) - 1))]
            container[key] = data.draw(ODD)

    reseal(path, edit)
    return path


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_of_a_sealed_manifest_ends_in_a_load_or_a_refusal(tmp_path: Path, data: st.DataObject) -> None:
    path = changed(data, tmp_path)
    for expected in ({}, {**state.expected(), "topology": {"members": {"default": [0]}}}, state.expected()):
        try:
            found = load(path.parents[1], COMM, expected)
        except CheckpointError:
            continue
        assert found is not None
        assert state.same_tensors(found.records["default"].tensors, state.record(0, 1, 3).tensors) == []
    assert inspect(path, verify=True)["path"] == str(path)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    write=st.sampled_from([export_torch, export_torch, export_safetensors, partial(reshard, world_size=2)]),
)
def test_any_change_of_a_sealed_manifest_ends_in_a_whole_folder_or_none(
    tmp_path: Path, data: st.DataObject, write: Callable[[Path, Path], object]
) -> None:
    path, target = changed(data, tmp_path), tmp_path / "out"
    shutil.rmtree(target, ignore_errors=True)
    try:
        write(path, target)
    except (CheckpointError, UsageError):
        assert not target.exists()
    else:
        assert any(target.iterdir())
    assert not list(tmp_path.glob(".out*"))


def into_a_file(source: Path, target: Path) -> None:
    import_model(source, target.with_suffix(".safetensors"))


def into_a_page(source: Path, target: Path) -> None:
    verify_resume.run(source, [], verify_resume.Ask(report=target))


@pytest.mark.parametrize("name", ["out", "zero2/out", "new/out"])
@pytest.mark.parametrize(
    "write", [export_safetensors, export_torch, partial(reshard, world_size=2), into_a_file, into_a_page]
)
def test_nothing_is_written_into_a_checkpoint(tmp_path: Path, write: Callable[[Path, Path], object], name: str) -> None:
    path = put(tmp_path, 3)
    with pytest.raises(UsageError, match=f"lies in the checkpoint {path}, which it would damage"):
        write(path, path / name)
    assert examine(path).complete
    assert not (path / "new").exists()
