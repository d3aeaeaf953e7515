"""Checkpoints written again for other world sizes: the files that a save there would write, or nothing at all."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from shardrun.checkpoint.commit import save
from shardrun.checkpoint.inspect import inspect
from shardrun.checkpoint.load import load
from shardrun.checkpoint.manifest import MANIFEST, read_manifest, seal
from shardrun.checkpoint.reshard import RESHARDED, reshard
from shardrun.checkpoint.snapshot import Snapshot, planned_files
from shardrun.checkpoint.store import is_checkpoint
from shardrun.comm.communicator import Communicator
from shardrun.errors import CheckpointError, UsageError
from shardrun.records import durable
from shardrun.records.header import read_header, write_safetensors
from shardrun.records.record import Zero2Record
from shardrun.records.reshard import copies, cut_again
from shardrun.records.tensors import tensor_bytes
from shardrun.shard.layout import Entry, plan_layout
from shardrun.shard.owners import balanced_owners, plan_owned_layout, replan_owned
from tests.golden import state
from tests.golden.runs import at_call, flip
from tests.support.ranks import run_ranks

ALONE = Communicator.single()


pytestmark = pytest.mark.sample(12)


def snapshot(rank: int, world_size: int, **own: Any) -> Snapshot:
    """The golden state with the own state of a rank that a run would save."""
    buffers = {"buffer/norm.running_mean": torch.arange(3.0)}
    streams = {"rng/torch": torch.arange(16, dtype=torch.uint8) + rank}
    config = {"topology": {"world_size": world_size, "threads_per_rank": 1}}
    sections: dict[str, Any] = {"config": config, "meaning": {"topology.world_size": world_size, "train.steps": 3}}
    made = state.snapshot(rank, world_size, **sections)
    return dataclasses.replace(made, rank_state={**streams, **buffers, **own})


def put(run_dir: Path, **own: Any) -> Path:
    return save(run_dir, ALONE, snapshot(0, 1, **own)).path


def save_on(comm: Communicator, run_dir: Path) -> None:
    own = {"buffer/mine": torch.full((2,), float(comm.rank))}
    save(run_dir, comm, snapshot(comm.rank, comm.world_size, **own))


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one rank, which no test changes."""
    return put(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks with a buffer that differs between them, which no test changes."""
    run_dir = tmp_path_factory.mktemp("two")
    run_ranks(2, save_on, run_dir)
    return run_dir / "checkpoints" / "step-0000000003"


def files(checkpoint: Path, *folders: str) -> dict[str, bytes]:
    """Every file but the manifest; with `folders` only those below them."""
    found = {str(path.relative_to(checkpoint)): path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    return {n: raw for n, raw in found.items() if n != MANIFEST and (not folders or n.split("/")[0] in folders)}


def written_by(rank: int, world_size: int, folder: Path) -> dict[str, bytes]:
    """The files that a save of this rank would write."""
    found = {}
    for number, file in enumerate(planned_files(snapshot(rank, world_size), rank, world_size)):
        write_safetensors(folder / f"{rank}-{number}", file.tensors, file.metadata, fsync=False)
        found[file.path] = (folder / f"{rank}-{number}").read_bytes()
    return found


# ---- the files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 64])
def test_the_files_are_those_that_a_save_of_that_world_writes(of_one: Path, tmp_path: Path, world_size: int) -> None:
    """On 64 ranks most have nothing: there are more ranks than blocks of 256 elements."""
    done = reshard(of_one, tmp_path / "out", world_size)
    found = inspect(done.path, verify=True)
    assert found["problems"] == []
    assert found["topology"]["world_size"] == world_size
    wanted: dict[str, bytes] = {}
    for rank in range(world_size):
        wanted |= written_by(rank, world_size, tmp_path)
    kept = {name: raw for name, raw in wanted.items() if not name.startswith("state/")}
    assert files(done.path, "zero2", "model.safetensors") == kept
    held = read_manifest(done.path)[0]
    entries = {entry["path"]: entry for entry in held["files"]}
    for rank in range(world_size):
        meta = snapshot(rank, world_size).records["default"].meta
        entry = entries[f"zero2/default/rank-{rank:05d}-of-{world_size:05d}.safetensors"]
        assert entry["fragments"] == meta["fragments"]
        assert entry["meta"] == {key: meta[key] for key in ("version", "rank", "world_size", "step_count")}
    assert (held["config"]["topology"]["world_size"], held["meaning"]["topology.world_size"]) == (world_size,) * 2
    assert held[RESHARDED]["world_size"] == 1


def test_there_and_back_gives_the_same_bytes(of_two: Path, tmp_path: Path) -> None:
    there = reshard(of_two, tmp_path / "five", 5).path
    back = reshard(there, tmp_path / "two", 2).path
    assert files(back, "zero2", "model.safetensors") == files(of_two, "zero2", "model.safetensors")
    again = reshard(reshard(back, tmp_path / "one", 1).path, tmp_path / "again", 2).path
    assert files(again, "zero2", "model.safetensors") == files(of_two, "zero2", "model.safetensors")


def test_a_load_at_the_new_world_size_gets_the_same_state(of_two: Path, tmp_path: Path) -> None:
    done = reshard(of_two, tmp_path / "out", 1)
    expected = state.expected()
    assert expected["groups"]["default"]["numerics"]["seam"] == "exchange"
    expected["groups"]["default"]["numerics"]["seam"] = "none"  # in a world of one nothing travels
    found = load(done.path, ALONE, {key: expected[key] for key in ("groups", "model", "aliases")})
    assert found is not None
    assert state.same_tensors(found.records["default"].tensors, state.record(0, 1, 0).tensors) == []
    model = state.parameters()
    assert state.same_tensors(found.model, {**model, "head.weight": model["emb.weight"]}) == []


def test_own_state_is_buffers_alone_and_a_difference_between_ranks_is_told(of_two: Path, tmp_path: Path) -> None:
    done = reshard(of_two, tmp_path / "out", 3)
    assert done.notes == (
        "1 buffers, mine among them, are not the same on all 2 ranks: rank r gets those of rank r modulo 2",
    )
    own = [load_file(path) for path in sorted((done.path / "state").iterdir())]
    assert [held["buffer/mine"].tolist() for held in own] == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    assert all(sorted(held) == ["buffer/mine", "buffer/norm.running_mean"] for held in own)


def test_no_torch_is_needed(of_one: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from shardrun.__main__ import main; sys.exit(main())"
    words = ["reshard", str(of_one), "--world", "2", "-o", str(tmp_path / "out"), "--json"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert (told["step"], told["before"], told["world_size"]) == (3, 1, 2)
    assert "random streams begin anew" in told["claim"]
    assert inspect(tmp_path / "out", verify=True)["good"]


MEASURE = """
import sys
from pathlib import Path
from shardrun.checkpoint.reshard import reshard

def status(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(key))

Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = status("VmRSS")
reshard(Path(sys.argv[1]), Path(sys.argv[2]), 3)
print(status("VmHWM") - before)
"""


def test_memory_is_that_of_chunks_and_not_of_tensors(tmp_path: Path) -> None:
    numel = 8_000_000
    layout = plan_layout([Entry("p00", numel, "float32", 0)], 100)
    meta = {
        "version": 1, "group": "default", "rank": 0, "world_size": 1, "step_count": 3, "contract": contract([numel]),
        "layout": layout.to_json(), "fragments": {"p00": [0, numel]},
    }  # fmt: skip
    record = Zero2Record(meta, {"p00/exp_avg": torch.ones(numel)})
    made = Snapshot(3, {"param_sha256": "x"}, {"p00": torch.ones(numel)}, records={"default": record})
    source = save(tmp_path / "run", ALONE, made).path
    words = [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 8 << 20  # the tensors have 32 MB each


# ---- all or nothing --------------------------------------------------------------------------------------------------


def test_killed_anywhere_it_leaves_the_whole_checkpoint_or_none(
    of_one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a killed process loses nothing that it wrote
    target, whole, number = tmp_path / "out[1]", [], 0
    while True:
        number += 1
        child = os.fork()
        if child == 0:
            durable.on_io = at_call(number, lambda path: os.kill(os.getpid(), signal.SIGKILL))
            code = 1
            try:
                reshard(of_one, target, 2)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        whole.append(is_checkpoint(target))
        assert whole[-1] or not target.exists()
        assert not [path for path in tmp_path.iterdir() if path != target and not path.name.startswith(".out[1].")]
        if whole[-1]:
            assert inspect(target, verify=True)["good"]
            durable.remove_tree(target)
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            break
    assert (whole.count(False), whole.count(True)) == (number - 2, 2)  # after the rename comes one more fsync
    assert number > 30
    (tmp_path / ".out[1].notes.part").write_text("a file of somebody")
    reshard(of_one, target, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out[1].notes.part", "out[1]"]  # what was left is gone


@pytest.mark.parametrize("call", ["mkdir", "create", "write", "fsync", "rename"])
def test_a_failing_disk_leaves_nothing(of_two: Path, tmp_path: Path, call: str) -> None:
    def fail(made: str, path: Path) -> None:
        if made == call and path != tmp_path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    durable.on_io = fail
    try:
        with pytest.raises(CheckpointError, match=r"out: cannot be written: No space left.* bytes are needed there"):
            reshard(of_two, tmp_path / "out", 3)
    finally:
        durable.on_io = durable._silent
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_after_the_rename_is_told_as_such(of_one: Path, tmp_path: Path) -> None:
    def fail(made: str, path: Path) -> None:
        if made == "fsync" and path == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    durable.on_io = fail
    try:
        with pytest.raises(
            CheckpointError, match="out: is whole, but whether it would survive a power cut is not known"
        ):
            reshard(of_one, tmp_path / "out", 3)
    finally:
        durable.on_io = durable._silent
    assert inspect(tmp_path / "out", verify=True)["good"]


def test_a_source_that_cannot_be_read_is_named(of_one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.FileIO):
        def readinto(self, buffer: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("shardrun.checkpoint.byte_copies.open_inside", lambda root, name: Broken(root / name))
    with pytest.raises(CheckpointError, match=f"{of_one}/model.safetensors: cannot be read: Input/output error"):
        reshard(of_one, tmp_path / "out", 3)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/out: cannot be written: File exists \(.*/file\); "):
        reshard(of_one, tmp_path / "file" / "out", 3)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_another_process_is_writing_is_left_alone(of_two: Path, tmp_path: Path) -> None:
    seen: list[Path] = []

    def on_io(made: str, path: Path) -> None:
        if path.name == MANIFEST and made == "create" and not seen:
            (staging,) = tmp_path.glob(".out.*.part")
            seen.append(staging)
            reshard(of_two, tmp_path / "out", 3)  # it comes first
            assert staging.is_dir()

    durable.on_io = on_io
    try:
        with pytest.raises(UsageError, match="out: is there already"):
            reshard(of_two, tmp_path / "out", 3)
    finally:
        durable.on_io = durable._silent
    assert seen
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    assert inspect(tmp_path / "out", verify=True)["good"]


# ---- refused ---------------------------------------------------------------------------------------------------------


def test_one_flipped_bit_in_any_file_is_found_and_named(of_two: Path, tmp_path: Path) -> None:
    for number, name in enumerate(sorted(files(of_two))):
        source = shutil.copytree(of_two, tmp_path / str(number))
        flip(source / name, 8 * (source / name).stat().st_size - 5)
        for world_size in (1, 3):
            with pytest.raises(CheckpointError, match=f"{name}: blake3:.* expected"):
                reshard(source, tmp_path / "out", world_size)
        (source / name).unlink()
        with pytest.raises(CheckpointError, match=f"{name}: is missing"):
            reshard(source, tmp_path / "out", 3)
        shutil.rmtree(source)
    assert list(tmp_path.iterdir()) == []


def test_a_half_filled_window_is_refused(tmp_path: Path) -> None:
    source = put(tmp_path, **{"window/blocks.0.weight": torch.zeros(7)})
    with pytest.raises(CheckpointError, match=r"holds window/blocks.0.weight .* half-filled window, .* to 1 ranks"):
        reshard(source, tmp_path / "out", 2)
    made = snapshot(0, 1)
    made.records["default"].meta["window"] = {"micro_batches": 1}
    with pytest.raises(CheckpointError, match=r"rank 0: window\), such as a half-filled window, .* to 1 ranks"):
        reshard(save(tmp_path / "other", ALONE, made).path, tmp_path / "out", 2)
    assert not (tmp_path / "out").exists()


def test_names_and_sizes_that_cannot_be_are_refused(of_two: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    for target, world_size, words in (
        ("taken", 3, "taken: is there already and is left as it is"),
        ("out", 2, "is of world size 2 already"),
        ("out", 0, "1 to 65,536 ranks are possible"),
        ("step-0000000004", 3, "is a name for a checkpoint of step 4, this one is of 3"),
    ):
        with pytest.raises(UsageError, match=words):
            reshard(of_two, tmp_path / target, world_size)
    assert (tmp_path / "taken").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_sealed_manifest_that_lacks_something_is_an_error_and_no_crash(of_one: Path, tmp_path: Path) -> None:
    source = shutil.copytree(of_one, tmp_path / "source")
    saved = read_manifest(source)[0]
    for section in ("layout", "optimizer"):
        groups = {"default": {key: value for key, value in saved["groups"]["default"].items() if key != section}}
        if section == "optimizer":
            groups["default"]["optimizer"] = {"strategy": "zero1"}  # without owners
        resealed(source, groups=groups)
        with pytest.raises(CheckpointError, match="malformed manifest"):
            reshard(source, tmp_path / "out", 2)
    assert not (tmp_path / "out").exists()


def resealed(source: Path, **sections: Any) -> None:
    body = {k: v for k, v in read_manifest(source)[0].items() if k not in ("digest", "format", "version")}
    (source / MANIFEST).write_bytes(seal({**body, **sections}))


RANK_1 = "zero2/default/rank-00001-of-00002.safetensors"


def lacking(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["half.weight/exp_avg"]


def of_another_dtype(tensors: dict[str, torch.Tensor]) -> None:
    tensors["half.weight/exp_avg"] = tensors["half.weight/exp_avg"].double()


def too_short(tensors: dict[str, torch.Tensor]) -> None:
    tensors["half.weight/exp_avg"] = tensors["half.weight/exp_avg"][1:]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lacking, r"state half.weight/exp_avg: held by ranks \[0\], expected \[0, 1\]"),
        (of_another_dtype, "state half.weight/exp_avg: rank 1 has dtype F64, another one F32"),
        (too_short, f"{RANK_1}: half.weight/exp_avg: shape .* the fragment .* has"),
    ],
)
def test_records_that_are_sealed_and_do_not_belong_together_are_refused(
    of_two: Path, tmp_path: Path, spoil: Any, words: str
) -> None:
    source = shutil.copytree(of_two, tmp_path / "source")
    tensors, metadata = load_file(source / RANK_1), read_header(source / RANK_1).metadata
    spoil(tensors)
    (source / RANK_1).unlink()
    made = write_safetensors(source / RANK_1, {n: tensor_bytes(n, tensor) for n, tensor in tensors.items()}, metadata)
    files = read_manifest(source)[0]["files"]
    next(entry for entry in files if entry["path"] == RANK_1).update(dataclasses.asdict(made))
    resealed(source, files=files)
    with pytest.raises(CheckpointError, match=words):
        reshard(source, tmp_path / "out", 3)
    assert not (tmp_path / "out").exists()


def test_a_file_with_its_tensors_in_another_order_is_refused(of_two: Path, tmp_path: Path) -> None:
    """Sound for the safetensors library, but no file of ours."""
    source = shutil.copytree(of_two, tmp_path / "source")
    raw, header = (source / RANK_1).read_bytes(), read_header(source / RANK_1)
    table, data = {}, b""
    for name, entry in reversed(header.tensors.items()):
        held = raw[entry.start : entry.stop]
        table[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [len(data), len(data) + len(held)]}
        data += held
    text = json.dumps({"__metadata__": header.metadata, **table}).encode()
    crafted = len(text).to_bytes(8, "little") + text + data
    (source / RANK_1).write_bytes(crafted)
    assert load_file(source / RANK_1).keys() == header.tensors.keys()
    files = read_manifest(source)[0]["files"]
    entry = next(one for one in files if one["path"] == RANK_1)
    entry.update(bytes=len(crafted), hash=f"sha256:{hashlib.sha256(crafted).hexdigest()}")
    resealed(source, files=files)
    with pytest.raises(CheckpointError, match=f"{RANK_1}: its tensors do not stand in the order in which shardrun"):
        reshard(source, tmp_path / "out", 3)


@pytest.mark.timeout(20)
def test_a_claimed_world_of_any_size_allocates_nothing(of_one: Path, tmp_path: Path) -> None:
    source = shutil.copytree(of_one, tmp_path / "source")
    resealed(source, topology={"world_size": 1 << 60})
    with pytest.raises(CheckpointError, match=r"lists a record of each of ranks \[0\], not one of every rank"):
        reshard(source, tmp_path / "out", 2)
    groups = read_manifest(source)[0]["groups"]
    resealed(source, groups={"default": {**groups["default"], "members": [0]}})
    with pytest.raises(CheckpointError, match=r"lists a state of each of ranks \[0\], not one of every rank"):
        reshard(source, tmp_path / "out", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_more_ranks_than_files_may_be_open_at_first(
    of_one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        done = reshard(of_one, tmp_path / "out", 150)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (100, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list((done.path / "zero2" / "default").iterdir())) == 150


# ---- a group of some of the ranks ------------------------------------------------------------------------------------


def of_some(comm: Communicator, run_dir: Path) -> None:
    """Three ranks; the group `pair` is ranks 0 and 1 only."""
    made = snapshot(comm.rank, comm.world_size)
    records, groups = dict(made.records), {"default": {"members": [0, 1, 2]}}
    if comm.rank < 2:
        records["pair"], groups["pair"] = state.record(comm.rank, 2), {"members": [0, 1]}
        records["pair"].meta["group"] = "pair"
    save(run_dir, comm, dataclasses.replace(made, records=records, manifest={**made.manifest, "groups": groups}))


def test_a_group_of_some_ranks_keeps_its_members_and_files(tmp_path: Path) -> None:
    run_ranks(3, of_some, tmp_path)
    source = tmp_path / "checkpoints" / "step-0000000003"
    done = reshard(source, tmp_path / "out", 2)
    groups = read_manifest(done.path)[0]["groups"]
    assert (groups["pair"]["members"], groups["default"]["members"]) == ([0, 1], [0, 1])
    pair = {name: raw for name, raw in files(source).items() if "/pair/" in name}
    assert len(pair) == 2
    assert pair.items() <= files(done.path).items()
    with pytest.raises(CheckpointError, match="group pair has rank 1, which a world of 1 does not have"):
        reshard(source, tmp_path / "none", 1)


# ---- integers --------------------------------------------------------------------------------------------------------

SIZES = st.lists(st.integers(1, 2000), min_size=1, max_size=10)


def contract(sizes: list[int]) -> list[dict[str, Any]]:
    return [
        {"path": f"p{index:02}", "shape": [size], "dtype": "float32", "trainable": True, "alias": index}
        for index, size in enumerate(sizes)
    ]


def metas(world_size: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {"version": 1, "rank": rank, "world_size": world_size, "step_count": 3, **more} for rank in range(world_size)
    ]


@given(SIZES, st.integers(1, 4000), st.integers(1, 7), st.integers(1, 7))
@settings(deadline=None)
def test_copies_carry_every_element_once_from_where_it_is(sizes: list[int], bucket: int, old: int, new: int) -> None:
    layout = plan_layout([Entry(f"p{index:02}", size, "float32", 0) for index, size in enumerate(sizes)], bucket)
    section = {"contract": contract(sizes), "layout": layout.to_json()}
    held = [{path: list(at) for path, at in layout.fragments(rank, old).items()} for rank in range(old)]
    cut = cut_again(section, held, metas(old), new)
    assert cut.fragments == [{p: list(at) for p, at in layout.fragments(rank, new).items()} for rank in range(new)]
    assert cut.section == {}
    for path, parts in copies(held, cut.fragments).items():
        for part in parts:
            assert held[part.source][path][0] <= part.start < part.stop <= held[part.source][path][1]
            assert cut.fragments[part.target][path][0] <= part.start < part.stop <= cut.fragments[part.target][path][1]
        elements = [element for part in parts for element in range(part.start, part.stop)]
        assert elements == list(range(sizes[int(path[1:])]))


@given(SIZES, st.integers(1, 4000), st.integers(1, 6), st.integers(1, 6), st.randoms())
@settings(deadline=None)
def test_owners_are_those_of_a_session_and_come_back(
    sizes: list[int], bucket: int, old: int, new: int, shuffle: Any
) -> None:
    """Whatever order the model defines its parameters in."""
    entries = [Entry(f"p{index:02}", size, "float32", 0) for index, size in enumerate(sizes)]
    shuffle.shuffle(entries)
    costs = {entry.path: 1 + entry.numel // 500 for entry in entries}  # with ties
    owners = balanced_owners(costs, old)
    layout = plan_owned_layout(entries, owners, bucket, old)
    section = {
        "contract": contract(sizes), "layout": layout.to_json(), "optimizer": {"strategy": "zero1", "owners": owners},
    }  # fmt: skip
    held = [{path: list(at) for path, at in layout.fragments(rank, old).items()} for rank in range(old)]
    there = cut_again(section, held, metas(old, costs=costs), new)
    assert there.section["optimizer"]["owners"] == balanced_owners(costs, new)
    assert all(meta["costs"].keys() == held.keys() for meta, held in zip(there.metas, there.fragments, strict=True))
    back = cut_again({**section, **there.section}, there.fragments, there.metas, old)
    assert (back.section["optimizer"]["owners"], back.fragments) == (owners, held)
    assert all(meta["costs"] == {path: costs[path] for path in held[rank]} for rank, meta in enumerate(back.metas))
    # Records that are older than costs are balanced by elements.
    numels = {entry.path: entry.numel for entry in entries}
    assert cut_again(section, held, metas(old), new).section["optimizer"]["owners"] == balanced_owners(numels, new)


@given(SIZES, st.integers(1, 4000), st.integers(1, 5), st.integers(1, 5), st.data())
@settings(deadline=None, max_examples=40)
def test_buckets_of_owned_tensors_are_planned_alike_for_other_owners(
    sizes: list[int], bucket: int, old: int, new: int, data: st.DataObject
) -> None:
    entries = [Entry(f"p{index:02}", size, "float32", index % 2) for index, size in enumerate(sizes)]
    before, after = ({entry.path: data.draw(st.integers(0, world - 1)) for entry in entries} for world in (old, new))
    layout = plan_owned_layout(entries, before, bucket, old)
    again = replan_owned(layout, before, after, new)
    assert [[b.start for b in space.buckets] for space in again.spaces] == [
        [b.start for b in space.buckets] for space in layout.spaces
    ]
    assert {path for rank in range(new) for path in again.fragments(rank, new) if after[path] == rank} == before.keys()
    from shardrun.run.optimizer import Placement

    order = Placement.of({"layout": again.to_json(), "optimizer": {"owners": after}}).order
    by_path = {entry.path: entry for entry in entries}
    assert plan_owned_layout([by_path[path] for path in order], after, bucket, new) == again


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda held, own: own[1].update(step_count=4), "the record of rank 1 has step_count 4, expected 3"),
        (lambda held, own: own[1].update(rank=0), "the record of rank 1 is marked as that of rank 0"),
        (lambda held, own: own[0].update(world_size=3), "the record of rank 0 has world_size 3, expected 2"),
        (lambda held, own: held[1].clear(), "its records are not whole: p00: its 700 elements are not held exactly"),
    ],
)
def test_records_that_make_no_whole_state_are_refused(spoil: Any, words: str) -> None:
    layout = plan_layout([Entry("p00", 700, "float32", 0)], 100)
    held = [{path: list(at) for path, at in layout.fragments(rank, 2).items()} for rank in range(2)]
    own = metas(2)
    spoil(held, own)
    with pytest.raises(CheckpointError, match=words):
        cut_again({"contract": contract([700]), "layout": layout.to_json()}, held, own, 3)


def test_the_order_of_tensors_in_a_file_does_not_depend_on_the_rank(of_two: Path) -> None:
    """That is what lets every file be read and written once, from its beginning to its end."""
    orders = [list(read_header(path).tensors) for path in sorted((of_two / "zero2" / "default").iterdir())]
    common = [[name for name in order if all(name in other for other in orders)] for order in orders]
    assert common[0] == common[1]
    assert common[0]
