"""Checkpoints of several ranks: one outcome on all of them, whatever happens to one."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from shardrun.checkpoint.commit import save
from shardrun.checkpoint.load import load
from shardrun.checkpoint.manifest import MANIFEST
from shardrun.checkpoint.store import CHECKPOINTS, newest, record_file, scan, step_name
from shardrun.comm.communicator import Communicator
from shardrun.errors import CheckpointError
from shardrun.records import durable
from tests.golden import state
from tests.golden.runs import flip, visible
from tests.support.ranks import run_ranks, start_ranks


def save_step(comm: Communicator, run_dir: Path, step: int, **options: Any) -> str:
    """Save the state of `step`; "saved", or the class and text of the error."""
    try:
        save(run_dir, comm, state.snapshot(comm.rank, comm.world_size, step, step), **options)
    except CheckpointError as error:
        return f"CheckpointError: {error}"
    return "saved"


def load_newest(comm: Communicator, path: Path, **options: Any) -> tuple[int, list[str]] | str:
    """(step, names of tensors that differ from the state of that step), or the text of the error."""
    try:
        found = load(path, comm, state.expected(comm.rank, comm.world_size), **options)
    except CheckpointError as error:
        return str(error)
    assert found is not None
    model = state.parameters(found.step)
    record = state.record(comm.rank, comm.world_size, found.step)
    rank_state = dict(state.snapshot(comm.rank, comm.world_size, found.step).rank_state)
    wrong = state.same_tensors(found.model, {**model, "head.weight": model["emb.weight"]})
    wrong += state.same_tensors(found.records[state.GROUP].tensors, record.tensors)
    wrong += state.same_tensors(found.rank_state, rank_state)
    return found.step, wrong


def saved_by(world_size: int, run_dir: Path, *steps: int) -> None:
    for step in steps:
        assert run_ranks(world_size, save_step, run_dir, step) == ["saved"] * world_size


@pytest.fixture(scope="module")
def at_step_3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the checkpoint of step 3 of two ranks; tests work on copies."""
    run_dir = tmp_path_factory.mktemp("start")
    saved_by(2, run_dir, 3)
    return run_dir


@pytest.fixture
def run_dir(at_step_3: Path, tmp_path: Path) -> Path:
    """A copy that the test may change."""
    return shutil.copytree(at_step_3, tmp_path / "run")


def hashes(folder: Path) -> dict[str, int]:
    return {str(path): hash(path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


# ---- together --------------------------------------------------------------------------------------------------------


def save_and_load(comm: Communicator, run_dir: Path) -> list[Any]:
    return [
        save_step(comm, run_dir, 3),
        load_newest(comm, run_dir),
        save_step(comm, run_dir, 4, keep=1),
        load_newest(comm, run_dir),
    ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_gets_back_what_it_saved(tmp_path: Path, world_size: int) -> None:
    answers = run_ranks(world_size, save_and_load, tmp_path)
    assert answers == [["saved", (3, []), "saved", (4, [])]] * world_size
    assert [found.step for found in scan(tmp_path)] == [4]
    files = sorted(p.name for p in (tmp_path / CHECKPOINTS / step_name(4) / "zero2" / "default").iterdir())
    assert files == [f"rank-0000{rank}-of-0000{world_size}.safetensors" for rank in range(world_size)]


def test_the_golden_state_is_cut_between_ranks() -> None:
    """Else the tests here would say nothing about cut parameters and their scalars."""
    starts = [state.record(rank, 3).meta["fragments"] for rank in range(3)]
    assert [path for held in starts for path, (start, _) in held.items() if start > 0]


def load_expecting(comm: Communicator, path: Path, odd_rank: int) -> str:
    expected = state.expected(comm.rank, comm.world_size)
    if comm.rank == odd_rank:
        expected["numerics"] = {"torch": "other"}
        expected["aliases"] = {}
        expected["model"]["head.weight"] = expected["model"]["emb.weight"]
    try:
        load(path, comm, expected)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_a_misfit_on_one_rank_is_refused_by_all(run_dir: Path) -> None:
    first, second = run_ranks(2, load_expecting, run_dir, 1)
    assert first == second
    assert "rank 1: numerics.torch: saved 'any', this run 'other'" in first
    assert "rank 1: model: head.weight: saved tied to emb.weight, this run as a tensor of its own" in first


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_world_size_is_refused_naming_both(run_dir: Path, world_size: int) -> None:
    before = visible(run_dir)
    answers = run_ranks(world_size, load_newest, run_dir)
    assert len(set(answers)) == 1
    assert (
        f"world size saved 2, this run {world_size} (resume with --reshard, or use `shardrun reshard`; " in answers[0]
    )
    assert visible(run_dir) == before


def test_damage_in_one_ranks_file_is_told_by_all_and_all_go_back_alike(run_dir: Path) -> None:
    saved_by(2, run_dir, 4)
    bad = run_dir / CHECKPOINTS / step_name(4) / record_file("default", 1, 2)
    flip(bad, 8 * bad.stat().st_size - 3)
    answers = run_ranks(2, load_newest, run_dir)
    assert answers[0] == answers[1]
    assert f"rank 1: {bad}: blake3:" in answers[0]
    assert "--allow-fallback takes it" in answers[0]
    assert run_ranks(2, load_with_fallback, run_dir) == [(3, [])] * 2


def load_with_fallback(comm: Communicator, path: Path) -> tuple[int, list[str]] | str:
    return load_newest(comm, path, allow_fallback=True)


# ---- a folder that is not shared -------------------------------------------------------------------------------------


def save_in_own_folder(comm: Communicator, folders: list[Path]) -> str:
    return save_step(comm, folders[comm.rank], 4)


def test_a_folder_that_is_not_shared_is_found_before_anything_is_written(run_dir: Path, tmp_path: Path) -> None:
    folders = [run_dir, tmp_path / "other"]
    before = visible(folders[0])
    first, second = run_ranks(2, save_in_own_folder, folders)
    for answer in (first, second):
        assert "rank 1" in answer
        assert "has to be one folder that all ranks share" in answer
    assert visible(folders[0]) == before
    assert not folders[1].exists()


def load_from_own_folder(comm: Communicator, folders: list[Path]) -> tuple[int, list[str]] | str:
    return load_newest(comm, folders[comm.rank])


def test_a_rank_that_sees_another_manifest_is_found(run_dir: Path, tmp_path: Path) -> None:
    folders = [run_dir, tmp_path / "other"]
    saved_by(2, folders[1], 2, 3)  # the same step and state; another sequence number
    for answer in run_ranks(2, load_from_own_folder, folders):
        assert f"rank 1: {folders[1]}" in answer
        assert "is another one than rank 0 reads" in answer
    (folders[1] / CHECKPOINTS / step_name(3) / MANIFEST).unlink()
    assert "rank 1: " in str(run_ranks(2, load_from_own_folder, folders)[0])


# ---- ranks that differ -----------------------------------------------------------------------------------------------


def save_differing(comm: Communicator, run_dir: Path, how: str) -> str:
    odd = comm.rank == 1
    step = 5 if odd and how == "step" else 4
    sections: dict[str, Any] = {}
    if odd and how == "parameters":
        sections["param_sha256"] = "f" * 64
    if odd and how == "counters":
        sections["counters"] = {"tokens": 1, "updates": 4}
    snapshot = state.snapshot(comm.rank, comm.world_size, step, 4, **sections)
    if odd and how == "scalar":
        for name, tensor in snapshot.records["default"].tensors.items():
            if name.endswith("/step"):
                tensor.add_(1)
    if odd and how == "missing state":
        for name in [name for name in snapshot.records["default"].tensors if name.endswith("exp_avg")]:
            del snapshot.records["default"].tensors[name]
    try:
        save(run_dir, comm, snapshot)
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("step", "step: rank 0 has 4, rank 1 has 5"),
        ("parameters", "param_sha256: rank 0 has"),
        ("counters", 'counters: rank 0 has {"tokens":400,"updates":4}, rank 1 has {"tokens":1,"updates":4}'),
        ("scalar", "the ranks hold unlike state of half.weight"),
        ("missing state", "the ranks hold unlike state of half.weight"),
    ],
)
def test_ranks_that_differ_save_nothing(run_dir: Path, how: str, words: str) -> None:
    before = visible(run_dir)
    answers = run_ranks(2, save_differing, run_dir, how)
    assert words in answers[0]
    assert words in answers[1]
    assert visible(run_dir) == before


# ---- a rank whose disk fails, a rank that dies -----------------------------------------------------------------------


def act_on(comm: Communicator, rank: int, call: str, name: str, code: int) -> None:
    """On `rank`, before `call` on a path that begins with `name`: raise errno `code` once, or SIGKILL where it is 0."""
    done = False

    def on_io(made: str, path: Path) -> None:
        nonlocal done
        if comm.rank == rank and made == call and path.name.startswith(name) and not done:
            done = True
            if code:
                raise OSError(code, os.strerror(code), str(path))
            os.kill(os.getpid(), signal.SIGKILL)

    durable.on_io = on_io


def save_failing(comm: Communicator, run_dir: Path, rank: int, call: str, name: str, code: int) -> list[str]:
    act_on(comm, rank, call, name, code)
    first = save_step(comm, run_dir, 4)
    return [first, save_step(comm, run_dir, 5)]


@pytest.mark.parametrize(
    ("rank", "call", "name", "code"),
    [
        (1, "write", "rank-00001", errno.ENOSPC),
        (1, "fsync", "rank-00001", errno.EIO),
        (1, "create", "rank-00001", errno.EDQUOT),
        (0, "write", "model", errno.ENOSPC),
        (0, "create", MANIFEST, errno.EROFS),
        (0, "rename", "step-0000000004", errno.EIO),
    ],
)
def test_an_error_on_one_rank_is_everybodys_and_the_next_save_works(
    run_dir: Path, rank: int, call: str, name: str, code: int
) -> None:
    before = hashes(run_dir / CHECKPOINTS / step_name(3))
    answers = run_ranks(2, save_failing, run_dir, rank, call, name, code)
    for first, second in answers:
        assert f"rank {rank}: " in first
        assert os.strerror(code) in first
        assert f"{run_dir / CHECKPOINTS}: cannot save" in first
        assert "this checkpoint needs" in first
        assert second == "saved"
    assert hashes(run_dir / CHECKPOINTS / step_name(3)) == before
    assert [found.step for found in scan(run_dir)] == [5, 3]
    assert not list((run_dir / CHECKPOINTS / ".staging").iterdir())


def save_dying(comm: Communicator, run_dir: Path, rank: int, call: str, name: str) -> str:
    act_on(comm, rank, call, name, 0)
    return save_step(comm, run_dir, 4, keep=1)


@pytest.mark.parametrize(
    ("rank", "call", "name", "step"),
    [
        (1, "write", "rank-00001", 3),
        (0, "fsync", "model", 3),
        (0, "create", MANIFEST, 3),
        (0, "rename", "step-0000000004", 3),
        (0, "fsync", "checkpoints", 4),
        (0, "replace", "LATEST", 4),
        (0, "unlink", "model", 4),
    ],
)
def test_a_killed_rank_leaves_the_old_or_the_new(run_dir: Path, rank: int, call: str, name: str, step: int) -> None:
    with start_ranks(2, save_dying, run_dir, rank, call, name, debug="OFF") as ranks:
        outcomes = ranks.collect(timeout_s=60)
    assert outcomes[rank].killed_by == signal.SIGKILL
    assert "CommunicatorError" in (outcomes[1 - rank].error or "")
    assert run_ranks(2, load_and_go_on, run_dir) == [[(step, []), "saved"]] * 2
    found = newest(run_dir)
    assert found is not None
    assert (found.step, len(scan(run_dir))) == (9, 1)
    assert {name.split("/")[0] for name in visible(run_dir)} == {"LATEST", step_name(9)}


def load_and_go_on(comm: Communicator, run_dir: Path) -> list[Any]:
    return [load_newest(comm, run_dir), save_step(comm, run_dir, 9, keep=1)]
