"""Names, the scan, which one is newest, and the lock of a run folder."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from shardrun.checkpoint.lock import RunLock, read_owner
from shardrun.checkpoint.manifest import MANIFEST, canonical_json, is_plain_name, is_safe_path, seal, sha256
from shardrun.checkpoint.safe_files import open_inside
from shardrun.checkpoint.staging import require_ownership
from shardrun.checkpoint.store import (
    CHECKPOINTS,
    LATEST,
    candidates,
    checkpoints_folder,
    examine,
    is_checkpoint,
    newest,
    read_latest,
    record_file,
    scan,
    state_file,
    step_name,
    step_of,
)
from shardrun.errors import CheckpointError, LaunchError


def sections(step: int, sequence: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "sequence": sequence,
        "saved_at": 1_700_000_000,
        "topology": {"world_size": 1},
        "groups": {},
        "model": {},
        "aliases": {},
        "files": [],
        **changes,
    }


def put(run_dir: Path, step: int, sequence: int, **changes: Any) -> Path:
    path = run_dir / CHECKPOINTS / step_name(step)
    path.mkdir(parents=True)
    (path / MANIFEST).write_bytes(seal(sections(step, sequence, **changes)))
    return path


def point_at(path: Path) -> None:
    hint = {"step": step_of(path.name), "dir": path.name, "manifest_sha256": sha256((path / MANIFEST).read_bytes())}
    (path.parent / LATEST).write_bytes(canonical_json(hint))


def test_names() -> None:
    assert step_name(1200) == "step-0000001200"
    assert step_of("step-0000001200") == 1200
    assert step_of(step_name(10**12)) == 10**12
    assert [step_of(name) for name in ("step-12", "step-0000001200.1", "xstep-0000001200", "step-000000120a")] == [
        None
    ] * 4
    assert record_file("default", 1, 4) == "zero2/default/rank-00001-of-00004.safetensors"
    assert state_file(0, 1) == "state/rank-00000-of-00001.safetensors"


@pytest.mark.parametrize(
    "path",
    ["../x", "/etc/passwd", "a/../b", "a//b", "./a", "a/", "", ".hidden", "a\\b", "a\0b", "a b", 3, None, "x" * 300],
)
def test_unsafe_paths(path: Any) -> None:
    assert not is_safe_path(path)


def test_safe_paths() -> None:
    assert all(is_safe_path(path) for path in ("model.safetensors", record_file("a-b_c.d", 0, 1), state_file(3, 4)))
    assert is_plain_name("experts.0")
    assert not is_plain_name("a/b")


def test_an_empty_or_absent_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert scan(tmp_path) == []
    assert newest(tmp_path / "absent") is None
    assert candidates(tmp_path) == []
    (tmp_path / CHECKPOINTS / ".staging" / "step-0000000009.1").mkdir(parents=True)
    (tmp_path / CHECKPOINTS / "notes").mkdir()
    assert scan(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "words"), [("absent", "does not exist"), ("file", "is no folder"), (".", "holds no checkpoint")]
)
def test_a_named_path_without_checkpoint_is_an_error(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=words) as caught:
        candidates(tmp_path / name, wanted="look at")
    assert str(tmp_path / name) in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def test_newest_is_the_one_saved_last_not_the_highest_step(tmp_path: Path) -> None:
    for sequence, step in enumerate((1, 2, 4, 3), 1):
        put(tmp_path, step, sequence)
    assert [found.step for found in scan(tmp_path)] == [3, 4, 2, 1]
    assert all(found.complete for found in scan(tmp_path))
    assert [found.step for found in candidates(tmp_path / CHECKPOINTS)] == [3, 4, 2, 1]


def test_an_unreadable_manifest_counts_as_newest_unless_latest_says_otherwise(tmp_path: Path) -> None:
    put(tmp_path, 1, 1)
    newer = put(tmp_path, 3, 2)
    broken = put(tmp_path, 5, 3)
    (broken / MANIFEST).write_text("{}")
    assert [found.step for found in scan(tmp_path)] == [5, 3, 1]
    point_at(newer)
    assert [found.step for found in scan(tmp_path)] == [3, 5, 1]
    (tmp_path / CHECKPOINTS / LATEST).write_bytes(
        canonical_json({"step": 5, "dir": broken.name, "manifest_sha256": ""})
    )
    assert [found.step for found in scan(tmp_path)] == [5, 3, 1]
    older = put(tmp_path, 2, 4)
    (older / MANIFEST).unlink()
    assert [found.step for found in scan(tmp_path)] == [5, 3, 2, 1]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"dir":', "[" * 5000, "\xff"])
def test_a_damaged_hint_is_no_hint(tmp_path: Path, content: str) -> None:
    put(tmp_path, 1, 1)
    (tmp_path / CHECKPOINTS / LATEST).write_text(content, encoding="latin-1")
    assert read_latest(tmp_path) == {}
    assert newest(tmp_path) is not None


def test_examine_names_every_file_that_is_not_as_registered(tmp_path: Path) -> None:
    entry = {"bytes": 3, "hash": f"blake3:{'0' * 64}", "role": "state", "rank": 0}
    path = put(tmp_path, 1, 1, files=[{**entry, "path": "a"}, {**entry, "path": "sub/b"}, {**entry, "path": "c"}])
    (path / "a").write_text("four")
    (path / "extra").write_text("")
    (path / "sub").mkdir()
    (path / "sub" / "b").symlink_to("../a")
    why = examine(path).why
    for line in (
        "a: 3 bytes expected, 4 found",
        "extra: is not in the manifest",
        "b: is not a regular file",
        "c: is missing",
    ):
        assert line in why
    assert not examine(path).complete


def test_a_checkpoint_under_another_step_is_not_complete(tmp_path: Path) -> None:
    path = put(tmp_path, 1, 1)
    moved = path.rename(path.with_name(step_name(2)))
    assert "is that of step 1" in examine(moved).why
    kept = shutil.copytree(moved, tmp_path / "kept-for-paper")
    assert examine(kept).complete
    assert is_checkpoint(kept)
    assert checkpoints_folder(tmp_path / CHECKPOINTS) == tmp_path / CHECKPOINTS


def test_open_inside_follows_no_link_and_waits_for_no_pipe(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("x")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file-link").symlink_to("real/file")
    os.mkfifo(tmp_path / "pipe")
    with open_inside(tmp_path, "real/file") as file:
        assert file.read() == b"x"
    for bad in ("link/file", "file-link", "pipe", "real", "absent"):
        with pytest.raises(CheckpointError):
            open_inside(tmp_path, bad)


# ---- the lock --------------------------------------------------------------------------------------------------------


def hold(run_dir: Path, ready: Any) -> None:
    with RunLock(run_dir) as lock:
        ready.send(lock.token)
        signal.pause()


def test_a_second_owner_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    run_dir = tmp_path / "new" / "run"
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=hold, args=(run_dir, there))
    process.start()
    try:
        assert here.poll(60)
        assert here.recv() == 1
        with pytest.raises(LaunchError, match=rf"in use by pid {process.pid} on ") as caught, RunLock(run_dir):
            pass
        assert str(run_dir) in str(caught.value)
        assert caught.value.exit_code == 5
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    with RunLock(run_dir) as lock:  # a killed owner leaves nothing that would have to be removed
        assert lock.token == 2
        owner = read_owner(run_dir)
        assert owner is not None
        assert (owner.pid, owner.token) == (os.getpid(), 2)


def test_the_token_grows_and_survives_a_damaged_file(tmp_path: Path) -> None:
    assert read_owner(tmp_path) is None
    tokens = []
    for _ in range(3):
        with RunLock(tmp_path) as lock:
            tokens.append(lock.token)
    assert tokens == [1, 2, 3]
    (tmp_path / ".lock").write_text("[not json")
    assert read_owner(tmp_path) is None
    with RunLock(tmp_path) as lock:
        assert lock.token == 1


def test_an_owner_that_cannot_be_read_is_not_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunLock(tmp_path) as lock:
        require_ownership(tmp_path, lock.token)
        full = OSError(errno.EMFILE, "Too many open files")
        monkeypatch.setattr("shardrun.checkpoint.lock.os.open", Mock(side_effect=full))
        with pytest.raises(CheckpointError) as caught:
            require_ownership(tmp_path, lock.token)
        monkeypatch.undo()
    assert str(caught.value) == (
        f"{tmp_path / '.lock'}: cannot be read: Too many open files; who owns this folder is not known, and nothing "
        "was published"
    )


def test_the_lock_cannot_be_taken_twice_in_one_process(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(LaunchError, match=f"pid {os.getpid()} "), RunLock(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "elsewhere")
    for run_dir in (tmp_path / "file" / "run", tmp_path / "run"):
        with pytest.raises(LaunchError, match="cannot be used as run folder") as caught, RunLock(run_dir):
            pass
        assert str(run_dir) in str(caught.value)
    assert not (tmp_path / "elsewhere").exists()


def test_the_lock_file_is_json_of_one_length(tmp_path: Path) -> None:
    sizes = set()
    for _ in range(12):
        with RunLock(tmp_path):
            raw = (tmp_path / ".lock").read_bytes()
            assert json.loads(raw)["pid"] == os.getpid()
            sizes.add(len(raw))
    assert len(sizes) == 1
