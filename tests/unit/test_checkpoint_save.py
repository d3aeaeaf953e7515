"""Saving in a world of one: what is published, what is refused, and what a broken disk leaves."""

from __future__ import annotations

import copy
import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from shardrun.checkpoint.commit import save
from shardrun.checkpoint.load import load
from shardrun.checkpoint.lock import RunLock
from shardrun.checkpoint.manifest import MANIFEST, read_manifest
from shardrun.checkpoint.retention import Retention, retire
from shardrun.checkpoint.snapshot import Snapshot
from shardrun.checkpoint.store import CHECKPOINTS, LATEST, newest, read_latest, scan, step_name
from shardrun.comm.communicator import Communicator
from shardrun.errors import CheckpointError, UsageError
from shardrun.records import durable
from tests.golden import state
from tests.golden.runs import RECORD, at_call, put, require_newest, visible

COMM = Communicator.single()


@pytest.fixture(autouse=True)
def _quiet_disk() -> Iterator[None]:
    silent = durable.on_io
    yield
    durable.on_io = silent


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    saved = save(tmp_path, COMM, state.snapshot())
    assert saved.path == tmp_path / CHECKPOINTS / "step-0000000003"
    assert saved.bytes == sum(path.stat().st_size for path in saved.path.rglob("*") if path.is_file())
    assert saved.notes == ()
    assert 0 < saved.free <= shutil.disk_usage(tmp_path).total
    found = load(tmp_path, COMM, state.expected())
    assert found is not None
    assert state.same_tensors(found.records["default"].tensors, state.record(0, 1).tensors) == []
    assert found.records["default"].meta == json.loads(json.dumps(state.record(0, 1).meta))
    assert found.model["head.weight"] is found.model["emb.weight"]
    assert found.manifest["counters"] == {"tokens": 300, "updates": 3}
    hint = {"step": 3, "dir": "step-0000000003", "manifest_sha256": read_manifest(saved.path)[1]}
    assert read_latest(tmp_path) == hint
    assert not list((tmp_path / CHECKPOINTS / ".staging").iterdir())


def test_the_official_library_opens_every_file(tmp_path: Path) -> None:
    path = put(tmp_path)
    model = safetensors.torch.load_file(path / "model.safetensors")
    assert state.same_tensors(model, state.parameters(3)) == []
    record = safetensors.torch.load_file(path / RECORD)
    assert state.same_tensors(record, state.record(0, 1, 3).tensors) == []
    rank_state = safetensors.torch.load_file(path / "state" / "rank-00000-of-00001.safetensors")
    assert rank_state["position"].item() == 3
    with safetensors.safe_open(path / "model.safetensors", "pt") as opened:
        assert opened.metadata()["format"] == "pt"


def test_the_same_state_gives_the_same_files(tmp_path: Path) -> None:
    first, second = put(tmp_path / "a"), put(tmp_path / "b")
    names = [path.relative_to(first) for path in first.rglob("*.safetensors")]
    assert len(names) == 3
    assert [name for name in names if (first / name).read_bytes() != (second / name).read_bytes()] == []


def test_padding_is_never_written_and_scalars_stand_once(tmp_path: Path) -> None:
    path = put(tmp_path)
    numel = {name: tensor.numel() for name, tensor in safetensors.torch.load_file(path / RECORD).items()}
    assert numel["blocks.0.weight/exp_avg"] == 7
    assert numel["blocks.0.weight/step"] == 1
    assert numel["half.weight/master"] == 900


# ---- keep, and which one is newest -----------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_nothing_is_refused(tmp_path: Path, keep: int) -> None:
    with pytest.raises(UsageError, match=f"keep {keep}: at least 1"):
        save(tmp_path, COMM, state.snapshot(), keep=keep)
    with pytest.raises(UsageError, match=f"keep {keep}: at least 1"):
        retire(tmp_path, Retention(keep))
    assert not list(tmp_path.iterdir())


def test_a_stale_higher_step_is_not_the_newest_and_goes_in_time(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        put(tmp_path, step, keep=2)
    assert [found.step for found in scan(tmp_path)] == [4, 3]
    put(tmp_path, 2, keep=2)  # as after a resume from an earlier step
    require_newest(tmp_path, 2)
    assert [found.step for found in scan(tmp_path)] == [2, 4]
    put(tmp_path, 3, keep=2)
    assert [found.step for found in scan(tmp_path)] == [3, 2]


def test_a_damaged_checkpoint_neither_counts_nor_goes(tmp_path: Path) -> None:
    damaged = put(tmp_path, 1)
    os.truncate(damaged / RECORD, 5)
    for step in (2, 3):
        put(tmp_path, step, keep=1)
    assert [(found.step, found.complete) for found in scan(tmp_path)] == [(3, True), (1, False)]


def test_multiples_stay_besides_the_newest(tmp_path: Path) -> None:
    for step in range(1, 8):
        put(tmp_path, step, keep=2, keep_every=3)
    assert [found.step for found in scan(tmp_path)] == [7, 6, 3]
    put(tmp_path, 8, keep=1, keep_every=3)
    assert [found.step for found in scan(tmp_path)] == [8, 6, 3]
    put(tmp_path, 9, keep=1)
    assert [found.step for found in scan(tmp_path)] == [9]
    with pytest.raises(UsageError, match="keep_every 0: steps are counted"):
        put(tmp_path, 10, keep=1, keep_every=0)


def test_keep_none_keeps_all(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        put(tmp_path, step)
    assert len(scan(tmp_path)) == 3


def test_saving_a_step_again_replaces_it_in_one_go(tmp_path: Path) -> None:
    put(tmp_path, 2)
    save(tmp_path, COMM, state.snapshot(step=3, seed=7), keep=2)
    seen = []

    def watch(call: str, path: Path) -> None:
        found = newest(tmp_path)
        assert found is not None
        seen.append((found.step, found.complete, found.path.name))

    durable.on_io = watch
    put(tmp_path, 3, keep=2)
    assert set(seen) == {(3, True, step_name(3))}
    require_newest(tmp_path, 3)
    assert [name for name in visible(tmp_path) if name.startswith(".")] == []


def test_replacing_works_where_names_cannot_be_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(source: Path, target: Path, flags: int) -> None:
        raise durable.RenameUnsupported(errno.EINVAL, "Invalid argument", str(source))

    monkeypatch.setattr(durable, "_renameat2", unsupported)
    save(tmp_path, COMM, state.snapshot(step=3, seed=7))
    put(tmp_path, 3, keep=1)
    require_newest(tmp_path, 3)
    assert [name for name in visible(tmp_path) if name.startswith(".")] == []
    with pytest.raises(FileExistsError):
        durable.rename_new(tmp_path / CHECKPOINTS / step_name(3), tmp_path)


def test_leftovers_are_no_checkpoints_and_the_next_save_clears_them(tmp_path: Path) -> None:
    put(tmp_path, 1)
    folder = tmp_path / CHECKPOINTS
    shutil.copytree(folder / step_name(1), folder / ".staging" / "step-0000000009.1.abc")
    shutil.copytree(folder / step_name(1), folder / ".trash" / "step-0000000008.abc")
    (folder / ".trash" / "link").symlink_to(folder / step_name(1))
    (folder / f".{LATEST}.1234").write_text("half")
    require_newest(tmp_path, 1)
    put(tmp_path, 2)
    assert [name for name in visible(tmp_path) if name.startswith(".")] == []
    assert not list((folder / ".trash").iterdir())
    assert [found.step for found in scan(tmp_path)] == [2, 1]


def test_links_among_leftovers_are_removed_and_what_they_point_to_stays(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("x")
    put(tmp_path, 1)
    folder = tmp_path / CHECKPOINTS
    shutil.rmtree(folder / ".staging")
    (folder / ".staging").symlink_to(precious)
    (folder / ".trash").mkdir()
    (folder / ".trash" / "old").symlink_to(precious)
    put(tmp_path, 2)
    assert (precious / "data").read_text() == "x"
    assert [path.name for path in folder.iterdir() if path.is_symlink()] == []


# ---- a disk that fails -----------------------------------------------------------------------------------------------


def fail(code: int, path: Path) -> None:
    raise OSError(code, os.strerror(code), str(path))


def _outcome_of_save(run_dir: Path, before: dict[str, bytes], cause: str) -> str:
    """Save step 4 over step 3 on a disk that fails once, and check what it left."""
    error, saved = None, None
    try:
        saved = save(run_dir, COMM, state.snapshot(step=4, seed=4), keep=1)
    except CheckpointError as raised:
        error = str(raised)
    durable.on_io = lambda call, path: None
    if error is None:
        assert saved is not None
        require_newest(run_dir, 4)
        assert all(cause in note for note in saved.notes)
        return "noted" if saved.notes else "done"
    assert cause in error
    assert str(run_dir) in error
    if "is published" in error:
        require_newest(run_dir, 4)
        return "published, told"
    require_newest(run_dir, 3)
    assert visible(run_dir) == before
    assert " bytes are free there" in error
    return "refused"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_at_any_call_leaves_the_old_or_the_new(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a hundred saves
    put(tmp_path / "start", 3)
    before = visible(tmp_path / "start")
    outcomes = []
    for number in range(1, 200):
        run_dir = tmp_path / str(number)
        shutil.copytree(tmp_path / "start", run_dir)
        durable.on_io = at_call(number, partial(fail, code))
        outcomes.append(_outcome_of_save(run_dir, before, os.strerror(code)))
        shutil.rmtree(run_dir)
        if outcomes[-1] == "done":
            break
    assert outcomes[-1] == "done"
    assert outcomes.count("refused") > 25
    assert outcomes.count("published, told") == 1
    assert outcomes.count("noted") > 5


def test_too_little_room_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 3)
    before = visible(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 1234, 1234))
    with pytest.raises(CheckpointError, match="not enough room") as caught:
        put(tmp_path, 4)
    needed = sum(path.stat().st_size for path in (tmp_path / CHECKPOINTS / step_name(3)).rglob("*.safetensors"))
    assert f"this checkpoint needs {needed:,} bytes, 1,234 bytes are free there" in str(caught.value)
    assert str(tmp_path / CHECKPOINTS) in str(caught.value)
    assert visible(tmp_path) == before


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINTS).write_text("a file")
    with pytest.raises(CheckpointError, match="cannot save") as caught:
        put(tmp_path)
    assert str(tmp_path / CHECKPOINTS) in str(caught.value)


def test_a_run_that_lost_its_folder_publishes_nothing(tmp_path: Path) -> None:
    with RunLock(tmp_path) as mine:
        put(tmp_path, 3, fence=mine.token)
    with RunLock(tmp_path) as other:
        before = visible(tmp_path)
        with pytest.raises(CheckpointError, match=rf"owned by pid {os.getpid()} on .* nothing was published"):
            put(tmp_path, 4, fence=mine.token)
        assert visible(tmp_path) == before
        put(tmp_path, 4, fence=other.token)
    (tmp_path / ".lock").unlink()
    with pytest.raises(CheckpointError, match="owned by nobody"):
        put(tmp_path, 5, fence=other.token)
    require_newest(tmp_path, 4)


# ---- what is no whole state ------------------------------------------------------------------------------------------


def broken(how: str) -> Snapshot:
    snapshot = state.snapshot()
    record = snapshot.records["default"]
    match how:
        case "no digest":
            return dataclasses.replace(
                snapshot, manifest={k: v for k, v in snapshot.manifest.items() if k != "param_sha256"}
            )
        case "not json":
            return dataclasses.replace(snapshot, manifest={**snapshot.manifest, "counters": {"loss": float("nan")}})
        case "keys that are numbers":  # they would come back as text, in another order
            return dataclasses.replace(snapshot, manifest={**snapshot.manifest, "counters": {9: 1, 10: 2}})
        case "too deep":
            deep = json.loads("[" * 50 + "]" * 50)
            return dataclasses.replace(snapshot, manifest={**snapshot.manifest, "counters": deep})
        case "padding":
            record.tensors["blocks.0.weight/exp_avg"] = torch.zeros(256)
        case "unknown path":
            record.tensors["blocks.7.weight/exp_avg"] = torch.zeros(1)
        case "left out":
            del record.meta["fragments"]["blocks.0.weight"]
            for key in ("exp_avg", "exp_avg_sq", "step"):
                del record.tensors[f"blocks.0.weight/{key}"]
        case "other contract":
            return dataclasses.replace(
                snapshot, manifest={**snapshot.manifest, "groups": {"default": {"contract": []}}}
            )
        case "no tensor":
            return dataclasses.replace(snapshot, rank_state={"rng": torch.zeros(1, device="meta")})
        case "alias of nothing":
            return dataclasses.replace(snapshot, aliases={"head.weight": "gone"})
        case "alias stored":
            return dataclasses.replace(snapshot, aliases={"emb.weight": "temperature"})
        case "group name":
            return dataclasses.replace(snapshot, records={"../up": record})
    return snapshot


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no digest", "param_sha256 is missing"),
        ("not json", "counters of the manifest is not plain JSON"),
        ("keys that are numbers", "counters of the manifest has keys that are not text"),
        ("too deep", "nested more than 40 levels"),
        ("padding", r"blocks.0.weight/exp_avg: shape \[256\]; the fragment \[0, 7\] has 7 elements"),
        ("unknown path", "blocks.7.weight/exp_avg: this rank holds no fragment"),
        ("left out", "blocks.0.weight: its 7 elements are not held exactly once: no rank"),
        ("other contract", "group default: contract of its record is not the contract in the manifest"),
        ("no tensor", "rng: .* on meta"),
        ("alias of nothing", r"aliases \['head.weight'\]"),
        ("alias stored", r"aliases \['emb.weight'\]"),
        ("group name", r"group '../up' cannot be a folder name"),
    ],
)
def test_a_state_that_is_not_whole_is_not_saved(tmp_path: Path, how: str, words: str) -> None:
    put(tmp_path, 2)
    before = visible(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        save(tmp_path, COMM, broken(how))
    assert visible(tmp_path) == before


def test_a_run_without_groups_or_state_can_be_saved(tmp_path: Path) -> None:
    bare = Snapshot(0, {"param_sha256": "x"}, {"w": torch.ones(2)})
    save(tmp_path, COMM, bare)
    found = load(tmp_path, COMM, {"model": {"w": ["float32", [2]]}, "aliases": {}, "groups": {}})
    assert found is not None
    assert (found.step, found.records, found.rank_state) == (0, {}, {})
    assert found.model["w"].tolist() == [1.0, 1.0]


def test_the_manifest_lists_every_file_with_its_role(tmp_path: Path) -> None:
    path = put(tmp_path)
    manifest = read_manifest(path)[0]
    assert [(entry["path"], entry["role"], entry["rank"]) for entry in manifest["files"]] == [
        ("model.safetensors", "model", 0),
        ("state/rank-00000-of-00001.safetensors", "state", 0),
        (RECORD, "record", 0),
    ]
    assert manifest["groups"]["default"]["layout"] == json.loads(json.dumps(state.record(0, 1).meta["layout"]))
    assert (path / MANIFEST).stat().st_mode & 0o111 == 0


def test_saving_changes_no_tensor(tmp_path: Path) -> None:
    snapshot = state.snapshot()
    before = copy.deepcopy(dict(snapshot.model)), copy.deepcopy(snapshot.records["default"].tensors)
    save(tmp_path, COMM, snapshot)
    assert state.same_tensors(dict(snapshot.model), before[0]) == []
    assert state.same_tensors(snapshot.records["default"].tensors, before[1]) == []
