"""Public bug reports about checkpoints, one test per case of cases/handed.md, at the level of files and records."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from shardrun.checkpoint.commit import Snapshot, save
from shardrun.checkpoint.inspect import inspect
from shardrun.checkpoint.load import load
from shardrun.checkpoint.lock import RunLock
from shardrun.checkpoint.reshard import reshard
from shardrun.checkpoint.snapshot import model_specs
from shardrun.checkpoint.store import CHECKPOINTS, LATEST, candidates, newest, read_latest, scan, step_name
from shardrun.cli import inspect_ckpt
from shardrun.comm.communicator import Communicator
from shardrun.errors import CheckpointError, LaunchError, UsageError
from shardrun.records import durable
from shardrun.records.record import Zero2Record
from shardrun.shard.contract import Contract, ParameterSpec
from shardrun.shard.layout import Entry, plan_layout
from tests.golden import state
from tests.golden.runs import RECORD, put, require_newest, visible
from tests.support.ranks import run_ranks, start_ranks

ALONE = Communicator.single()


def saved_on(comm: Communicator, run_dir: Path, steps: list[int], **options: Any) -> None:
    for step in steps:
        save(run_dir, comm, state.snapshot(comm.rank, comm.world_size, step, step), **options)


def differing(comm: Communicator, path: Path, step: int) -> list[str]:
    """Names that are not as in the golden state of `step`, after a load on all ranks."""
    found = load(path, comm, state.expected(comm.rank, comm.world_size))
    assert found is not None
    if found.step != step:
        return [f"step {found.step}"]
    record = state.record(comm.rank, comm.world_size, step).tensors
    stored = {name: tensor for name, tensor in found.model.items() if name not in state.TIED}
    return state.same_tensors(stored, state.parameters(step)) + state.same_tensors(
        found.records["default"].tensors, record
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight


def tied_snapshot(model: Tied) -> Snapshot:
    return Snapshot(1, {"param_sha256": "x"}, {"emb.weight": model.emb.weight}, {"head.weight": "emb.weight"})


def test_c028_a_tied_tensor_is_stored_once_and_its_tie_recorded(tmp_path: Path) -> None:
    model = Tied()
    saved = save(tmp_path, ALONE, tied_snapshot(model))
    assert list(safetensors.torch.load_file(saved.path / "model.safetensors")) == ["emb.weight"]
    found = load(tmp_path, ALONE, {})
    assert found is not None
    assert found.manifest["aliases"] == {"head.weight": "emb.weight"}
    assert torch.equal(found.model["head.weight"], model.emb.weight)
    assert found.model["head.weight"] is found.model["emb.weight"]


def test_c029_both_names_are_shown_and_a_fresh_model_loads_without_a_missing_key(tmp_path: Path) -> None:
    model = Tied()
    saved = save(tmp_path, ALONE, tied_snapshot(model))
    shown = {row["name"]: row for row in inspect(saved.path)["model"]}
    assert shown["head.weight"]["alias_of"] == "emb.weight"
    assert (shown["emb.weight"]["alias_of"], shown["emb.weight"]["bytes"]) == (None, 60)
    assert sum(row["bytes"] for row in shown.values()) == 60
    found = load(tmp_path, ALONE, {})
    assert found is not None
    fresh = Tied()
    assert fresh.load_state_dict(found.model, strict=True).missing_keys == []
    assert torch.equal(fresh.head.weight, model.head.weight)
    plain = Tied()  # as a user of the safetensors library would
    missing, unexpected = safetensors.torch.load_model(plain, saved.path / "model.safetensors")
    assert (list(missing), list(unexpected)) == ([], [])
    assert torch.equal(plain.head.weight, model.head.weight)


def test_c033_b_a_changed_tie_is_named_at_resume(tmp_path: Path) -> None:
    save(tmp_path, ALONE, tied_snapshot(Tied()))
    untied = {"model": {"emb.weight": ["float32", [5, 3]], "head.weight": ["float32", [5, 3]]}, "aliases": {}}
    with pytest.raises(
        CheckpointError, match=r"head.weight: saved tied to emb.weight, this run as a tensor of its own"
    ):
        load(tmp_path, ALONE, untied)


# ---- world size ------------------------------------------------------------------------------------------------------

C067 = {"p0": 7, "p1": 5, "p2": 3, "p3": 1, "p4": 11, "wide": 700}


def c067_snapshot(rank: int, world_size: int) -> Snapshot:
    """Live state whose every element tells its place."""
    contract = Contract.of(ParameterSpec(p, (n,), "float32", True, i) for i, (p, n) in enumerate(sorted(C067.items())))
    layout = plan_layout([Entry(path, numel, "float32", 0) for path, numel in C067.items()], 256)
    assert len(layout.spaces[0].buckets) > 3
    fragments = layout.fragments(rank, world_size)
    tensors = {f"{path}/exp_avg": c067_live(path)[start:stop] for path, (start, stop) in fragments.items()}
    meta = {
        "version": 1, "group": "default", "rank": rank, "world_size": world_size, "contract": contract.to_json(),
        "layout": layout.to_json(), "fragments": {path: list(held) for path, held in fragments.items()},
    }  # fmt: skip
    model = {path: c067_live(path) for path in C067}
    return Snapshot(3, {"param_sha256": "x"}, model, records={"default": Zero2Record(meta, tensors)})


def c067_live(path: str) -> Tensor:
    return torch.arange(1, C067[path] + 1) + 1000.0 * list(C067).index(path)


def c067_save(comm: Communicator, run_dir: Path) -> None:
    save(run_dir, comm, c067_snapshot(comm.rank, comm.world_size))


def c067_save_cut_short(comm: Communicator, run_dir: Path) -> str:
    snapshot = c067_snapshot(comm.rank, comm.world_size)
    record = snapshot.records["default"]
    if comm.rank == 1:
        held = record.meta["fragments"]["wide"]
        record.meta["fragments"]["wide"] = [held[0], held[1] + 68]  # up to the end of the padding
        record.tensors["wide/exp_avg"] = torch.cat([record.tensors["wide/exp_avg"], torch.zeros(68)])
    try:
        save(run_dir, comm, snapshot)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_c067_records_are_whole_without_padding_and_nothing_is_read_past_the_end(tmp_path: Path) -> None:
    run_ranks(2, c067_save, tmp_path)
    path = tmp_path / CHECKPOINTS / step_name(3)
    for checkpoint in (path, reshard(path, tmp_path / "three", 3).path, reshard(path, tmp_path / "one", 1).path):
        files = [safetensors.torch.load_file(file) for file in sorted((checkpoint / "zero2" / "default").iterdir())]
        for name in C067:
            pieces = torch.cat([file[f"{name}/exp_avg"] for file in files if f"{name}/exp_avg" in file])
            assert torch.equal(pieces, c067_live(name)), name
    held = {row["name"]: row for row in inspect(path)["groups"]["default"]["state"]}
    assert len(held["wide/exp_avg"]["held_by"]) == 2
    assert [held[f"{name}/exp_avg"]["shape"] for name in C067] == [[numel] for numel in C067.values()]
    for answer in run_ranks(2, c067_save_cut_short, tmp_path / "other"):
        assert "wide: its 700 elements are not held exactly once" in answer
    assert newest(tmp_path / "other") is None


def test_c068_one_state_saved_on_one_and_on_two_ranks_shows_the_same_tensors(tmp_path: Path) -> None:
    shown = {}
    for world_size in (1, 2):
        run_dir = tmp_path / str(world_size)
        run_ranks(world_size, saved_on, run_dir, [3])
        found = inspect(run_dir / CHECKPOINTS / step_name(3))
        assert found["topology"]["world_size"] == world_size
        shown[world_size] = [
            [row["name"], row["shape"], row["dtype"], row.get("sha256")]
            for row in [*found["model"], *found["groups"]["default"]["state"]]
        ]
        assert all(row[3] for row in shown[world_size] if row[0] not in state.TIED)
    assert shown[1] == shown[2]
    assert len(shown[1]) == 8 + len(state.optimizer_state())


# ---- crashes and full disks ------------------------------------------------------------------------------------------


def save_forever(comm: Communicator, run_dir: Path) -> None:
    for step in range(4, 400):
        saved_on(comm, run_dir, [step], keep=1)


def save_last(comm: Communicator, run_dir: Path) -> None:
    saved_on(comm, run_dir, [500], keep=1)


def resumed(comm: Communicator, run_dir: Path) -> tuple[int, list[str]]:
    found = load(run_dir, comm, state.expected(comm.rank, comm.world_size))
    assert found is not None
    return found.step, differing(comm, run_dir, found.step)


@pytest.mark.timeout(300)
def test_c072_killed_at_random_times_a_run_always_goes_on_from_a_whole_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, saved_on, tmp_path, [3])
    chance = random.Random(72)
    last = 3
    for _ in range(20):
        with start_ranks(2, save_forever, tmp_path, debug="OFF") as ranks:
            deadline = time.monotonic() + 30
            while read_latest(tmp_path).get("step") == last and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(chance.uniform(0, 0.3))
        found = newest(tmp_path)
        assert found is not None
        assert found.complete
        # One load stands for both ranks' files: inspect reads every byte of all of them.
        assert inspect(found.path, verify=True)["problems"] == []
        last = found.step
        del ranks
    assert run_ranks(2, resumed, tmp_path) == [(last, [])] * 2
    run_ranks(2, save_last, tmp_path)
    assert {name.split("/")[0] for name in visible(tmp_path)} == {LATEST, step_name(500)}


def delayed_save(comm: Communicator, run_dir: Path) -> None:
    def wait(call: str, path: Path) -> None:
        if comm.rank == 1 and call == "create":
            time.sleep(0.7)

    durable.on_io = wait
    saved_on(comm, run_dir, [4], keep=1)


def test_c073_the_pointer_never_names_what_is_not_there(tmp_path: Path) -> None:
    run_ranks(2, saved_on, tmp_path, [3])
    folder = tmp_path / CHECKPOINTS
    seen = set()
    with start_ranks(2, delayed_save, tmp_path) as ranks:
        while ranks.missing:
            hint = read_latest(tmp_path)
            target = folder / hint["dir"]
            try:
                problems = inspect(target, verify=True)["problems"]
            except CheckpointError:
                problems = ["gone"]
            if read_latest(tmp_path) == hint:  # else retention may have taken it meanwhile, as it should
                assert problems == []
                assert (folder / step_name(3)).is_dir() or hint["step"] == 4
                seen.add(hint["step"])
            ranks.poll(0.01)
        assert all(outcome.ok for outcome in ranks.collect())
    assert seen >= {3}
    assert read_latest(tmp_path)["step"] == 4
    assert [found.step for found in scan(tmp_path)] == [4]


def save_under_a_limit(comm: Communicator, run_dir: Path) -> list[str]:
    saved_on(comm, run_dir, [3])
    if comm.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
    try:
        saved_on(comm, run_dir, [4])
    except CheckpointError as error:
        return [str(error), *differing(comm, run_dir, 3)]
    return ["saved"]


def test_c074_a_full_disk_is_everybodys_error_and_harms_nothing(tmp_path: Path) -> None:
    answers = run_ranks(2, save_under_a_limit, tmp_path)
    needed = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    for answer in answers:
        assert len(answer) == 1
        assert "rank 1: " in answer[0]
        assert f"{tmp_path / CHECKPOINTS}: cannot save: File too large" in answer[0]
        assert f"this checkpoint needs {needed:,} bytes, " in answer[0]
        assert " bytes are free there" in answer[0]
    assert read_latest(tmp_path)["step"] == 3
    assert {name.split("/")[0] for name in visible(tmp_path)} == {LATEST, step_name(3)}


def test_c075_retention_removes_only_after_a_save_and_never_what_was_just_written(tmp_path: Path) -> None:
    counts = []

    def watch(call: str, path: Path) -> None:
        if call in ("rename", "replace", "unlink", "rmdir", "exchange"):
            counts.append(sum(found.complete for found in scan(tmp_path)))

    silent = durable.on_io
    put(tmp_path, 1, keep=2)
    durable.on_io = watch
    try:
        for step in (2, 3, 4):
            put(tmp_path, step, keep=2)
            assert scan(tmp_path)[0].step == step
        put(tmp_path, 2, keep=2)  # resumed from step 2 in the same folder ...
        put(tmp_path, 3, keep=2)  # ... and trained to 3
        require_newest(tmp_path, 3)
        assert [found.step for found in scan(tmp_path)] == [3, 2]
        assert min(counts) >= 1
        assert max(counts) <= 3
    finally:
        durable.on_io = silent
    before = visible(tmp_path)

    def fail(call: str, path: Path) -> None:
        if path.name == "model.safetensors" and call == "fsync":
            raise OSError(5, "Input/output error", str(path))

    durable.on_io = fail
    try:
        with pytest.raises(CheckpointError, match="Input/output error"):
            put(tmp_path, 4, keep=2)
    finally:
        durable.on_io = silent
    assert visible(tmp_path) == before
    with pytest.raises(UsageError, match="keep 0"):
        put(tmp_path, 5, keep=0)


def save_often(comm: Communicator, run_dir: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # the disk is not what is tested here
        saved_on(comm, run_dir, list(range(1, 51)), keep=1)


READER = """
import sys
from pathlib import Path
from shardrun.checkpoint.inspect import inspect
from shardrun.checkpoint.store import scan
from shardrun.errors import CheckpointError
reads = 0
while not (Path(sys.argv[1]) / "stop").exists():
    try:
        assert all(row["good"] for row in inspect(Path(sys.argv[1]), verify=True)["checkpoints"])
    except CheckpointError as error:
        assert "holds no checkpoint" in str(error), error  # before the first save
    for found in scan(Path(sys.argv[1])):
        try:
            inspect(found.path, verify=True)
        except CheckpointError:
            pass  # it was removed between the listing and the look
        reads += 1
print(reads)
"""


def test_c079_readers_do_no_harm_and_a_second_run_is_refused(tmp_path: Path) -> None:
    reader = subprocess.Popen([sys.executable, "-c", READER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        with RunLock(tmp_path) as lock:
            run_ranks(2, save_often, tmp_path)
            second = "from pathlib import Path; from shardrun.checkpoint.lock import RunLock; import sys\n"
            second += "with RunLock(Path(sys.argv[1])): pass"
            refused = subprocess.run(
                [sys.executable, "-c", second, str(tmp_path)], capture_output=True, text=True, check=False
            )
            assert refused.returncode != 0
            assert f"in use by pid {os.getpid()}" in refused.stderr
            with pytest.raises(LaunchError, match="in use"), RunLock(tmp_path):
                pass
            assert lock.token == 1
    finally:
        (tmp_path / "stop").touch()
        reads, _ = reader.communicate(timeout=30)
    assert reader.returncode == 0
    assert int(reads) > 0
    assert [found.step for found in scan(tmp_path)] == [50]
    assert inspect(tmp_path, verify=True)["good"]


# ---- wrong, incomplete or absent -------------------------------------------------------------------------------------


def test_c080_a_path_without_checkpoint_is_an_error_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("absent", "empty"):
        for look in (
            lambda path: candidates(path, wanted="resume from"),  # before any worker starts
            lambda path: load(path, ALONE, {}, required=True),
        ):
            with pytest.raises(CheckpointError, match="nothing to resume from") as caught:
                look(tmp_path / name)
            assert str(tmp_path / name) in str(caught.value)
            assert caught.value.exit_code == 3
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["empty"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("more", "model: 2.weight: expected (float32 [3, 3]), not in the checkpoint"),
        ("less", "model: 1.weight: saved (float32 [3, 3]), this run has no such tensor"),
        ("shape", "model: 1.weight: shape saved [3, 3], this run [4, 3]"),
        ("dtype", "model: 1.weight: dtype saved float32, this run bfloat16"),
    ],
)
def test_c081_a_model_of_another_form_is_refused_by_name(tmp_path: Path, change: str, line: str) -> None:
    def layers(*widths: int) -> nn.Sequential:
        return nn.Sequential(*[nn.Linear(3, width, bias=False) for width in widths])

    save(tmp_path, ALONE, Snapshot(1, {"param_sha256": "x"}, dict(layers(3, 3).state_dict())))
    other = {"more": layers(3, 3, 3), "less": layers(3), "shape": layers(3, 4), "dtype": layers(3, 3)}[change]
    if change == "dtype":
        other[1].to(torch.bfloat16)
    specs = model_specs(dict(other.state_dict()))
    with pytest.raises(CheckpointError, match="does not fit this run") as caught:
        load(tmp_path, ALONE, {"model": specs, "aliases": {}})
    assert line in str(caught.value)


@pytest.mark.parametrize("cut", ["4 bytes", "header", "empty"])
def test_c082_a_cut_file_is_named_with_both_sizes_and_the_others_are_good(
    tmp_path: Path, cut: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = put(tmp_path, 3)
    bad = path / RECORD
    size = bad.stat().st_size
    left = {"4 bytes": size - 4, "header": 100, "empty": 0}[cut]
    os.truncate(bad, left)
    told = f"{bad}: {size:,} bytes expected, {left:,} found"
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, ALONE, state.expected())
    assert told in str(caught.value)
    assert inspect_ckpt.run(path, verify=True, json=True) == 3
    shown = json.loads(capsys.readouterr().out)
    assert told in shown["problems"]
    status = {file["path"]: file["status"] for file in shown["files"]}
    assert status.pop(RECORD) == "bad"
    assert set(status.values()) == {"good"}


# ---- odd shapes ------------------------------------------------------------------------------------------------------


def test_c093_an_empty_parameter_is_kept_with_its_shape(tmp_path: Path) -> None:
    path = put(tmp_path, 3)
    shown = {row["name"]: row for row in inspect(path, verify=True)["model"]}
    assert (shown["frozen.empty"]["shape"], shown["frozen.empty"]["bytes"]) == ([0, 4], 0)
    found = load(tmp_path, ALONE, state.expected())
    assert found is not None
    assert found.model["frozen.empty"].shape == (0, 4)
    assert safetensors.torch.load_file(path / "model.safetensors")["frozen.empty"].shape == (0, 4)


def test_c095_a_view_of_another_layout_is_stored_by_its_logical_values(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    assert not weight.is_contiguous()
    saved = save(tmp_path, ALONE, Snapshot(1, {"param_sha256": "x"}, {"weight": weight}))
    stored = safetensors.torch.load_file(saved.path / "model.safetensors")["weight"]
    assert stored.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    found = load(tmp_path, ALONE, {"model": {"weight": ["float32", [3, 2]]}, "aliases": {}})
    assert found is not None
    assert torch.equal(found.model["weight"], weight)


# ---- memory ----------------------------------------------------------------------------------------------------------

C130_TENSORS, C130_NUMEL = 10, 2_500_000  # per rank: two moments of 10 parameters, 200 MB


def c130_peak(comm: Communicator, run_dir: Path) -> tuple[int, int]:
    """Bytes by which the resident set grew at its peak during a save, and bytes of state on this rank."""
    rank, world_size = comm.rank, comm.world_size
    paths = [f"p{index:02}" for index in range(C130_TENSORS * world_size)]
    mine = paths[rank * C130_TENSORS : (rank + 1) * C130_TENSORS]
    contract = Contract.of(ParameterSpec(path, (C130_NUMEL,), "float32", True, i) for i, path in enumerate(paths))
    tensors = {f"{path}/{key}": torch.ones(C130_NUMEL) for path in mine for key in ("exp_avg", "exp_avg_sq")}
    meta = {
        "version": 1, "group": "default", "rank": rank, "world_size": world_size, "contract": contract.to_json(),
        "fragments": {path: [0, C130_NUMEL] for path in mine},
    }  # fmt: skip
    snapshot = Snapshot(1, {"param_sha256": "x"}, {"w": torch.ones(1)}, records={"default": Zero2Record(meta, tensors)})
    saved_on(comm, run_dir / "warm", [1])
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    save(run_dir, comm, snapshot)
    return _status("VmHWM") - before, sum(tensor.nbytes for tensor in tensors.values())


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def test_c130_a_save_needs_the_memory_of_one_tensor_on_every_rank(tmp_path: Path) -> None:
    answers = run_ranks(2, c130_peak, tmp_path, timeout_s=120)
    one_tensor = 4 * C130_NUMEL
    for grown, held in answers:
        assert held == 2 * C130_TENSORS * one_tensor
        assert grown <= one_tensor + (8 << 20), answers
