"""inspect-ckpt --diff: what differs, by how much and where first, whatever slices hold the elements."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardrun.checkpoint.assemble import Piece, Whole, chunks
from shardrun.checkpoint.commit import save
from shardrun.checkpoint.difference import diff, index_of
from shardrun.cli import inspect_ckpt
from shardrun.comm.communicator import Communicator
from shardrun.errors import CheckpointError, UsageError
from shardrun.records.header import Entry, write_safetensors
from shardrun.records.tensors import tensor_bytes
from tests.golden import state
from tests.golden.runs import put

GOLDEN = Path(__file__).parents[1] / "golden" / "format-1" / "checkpoints" / "step-0000000003"


def alone(run_dir: Path, **sections: Any) -> Path:
    """The state of the golden checkpoint, saved by one rank and not by two."""
    return save(run_dir, Communicator.single(), state.snapshot(step=3, **sections)).path


def tensors_file(path: Path, **tensors: Tensor) -> Path:
    write_safetensors(path, {name: tensor_bytes(name, tensor) for name, tensor in tensors.items()}, {}, fsync=False)
    return path


def only(found: dict[str, Any]) -> dict[str, Any]:
    (row,) = found["differences"]
    return dict(row)


def test_two_worlds_hold_the_same_tensors(tmp_path: Path) -> None:
    found = diff(GOLDEN, alone(tmp_path))
    assert (found["same"], found["differences"]) == (True, [])
    assert found["compared"] == {"model": 7, "state": 16}
    whole = [*state.parameters().values(), *state.optimizer_state().values()]
    assert found["elements"] == sum(tensor.numel() for tensor in whole)
    assert found["settings"] == [{"key": "topology.world_size", "one": 2, "other": 1}]
    assert found["notes"] == ["the state of each rank (random streams, buffers) is left out: world sizes 2 and 1"]


def test_one_bit_in_a_slice_is_found_at_its_place_in_the_whole(tmp_path: Path) -> None:
    path = Path(shutil.copytree(GOLDEN, tmp_path / "step-0000000003"))
    file = path / "zero2/default/rank-00001-of-00002.safetensors"
    raw = bytearray(file.read_bytes())
    master = state.optimizer_state()["half.weight/master"]
    before, place = float(master[512 + 30]), raw.find(master[512:].numpy().tobytes())
    raw[place + 4 * 30] ^= 1
    file.write_bytes(raw)
    row = only(diff(path, alone(tmp_path / "run")))
    assert (row["section"], row["name"], row["what"]) == ("state", "half.weight/master", "values")
    assert (row["differing"], row["elements"]) == (1, 900)
    assert (row["first"]["element"], row["first"]["index"]) == (542, [180, 2])
    assert row["first"]["other"].startswith(str(before))
    changed = struct.unpack("<f", raw[place + 120 : place + 124])[0]
    assert row["max_abs"] == abs(changed - before)


def test_another_step_differs_in_values_and_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [put(tmp_path, step) for step in (2, 3)]
    found = diff(*paths)
    assert not found["same"]
    assert {row["what"] for row in found["differences"]} == {"values"}
    assert {line["key"] for line in found["settings"]} == {"step", "counters.tokens", "counters.updates"}
    names = {row["name"] for row in found["differences"]}
    assert {"emb.weight", "emb.weight/exp_avg", "rng.torch", "position"} - names == {"rng.torch"}
    for row in found["differences"]:
        if row["section"] == "model":
            one, other = (state.parameters(step)[row["name"]].double() for step in (2, 3))
            assert row["max_abs"] == float((one - other).abs().max())
            assert row["relative"] == pytest.approx(float((one - other).norm() / one.norm()))
            assert row["differing"] == int((one != other).sum())
    assert inspect_ckpt.run(paths[0], other=paths[1]) == 4
    shown = capsys.readouterr().out
    assert f"one    {paths[0]}" in shown
    assert "counters.tokens" in shown
    assert shown.splitlines()[-1].startswith("NOT identical: of ")


def test_what_is_in_one_only_and_other_forms_are_named(tmp_path: Path) -> None:
    one = tensors_file(tmp_path / "one", a=torch.zeros(3), b=torch.zeros(2, 3), c=torch.ones(2), gone=torch.ones(1))
    other = tensors_file(
        tmp_path / "other", a=torch.zeros(3), b=torch.zeros(3, 2), c=torch.ones(2).bfloat16(), new=torch.ones(1)
    )
    rows = {row["name"]: row for row in diff(one, other)["differences"]}
    assert {name: row["what"] for name, row in rows.items()} == {
        "b": "shape", "c": "dtype", "gone": "only in one", "new": "only in other"
    }  # fmt: skip
    assert rows["b"]["shapes"] == [[2, 3], [3, 2]]
    assert (rows["c"]["dtypes"], rows["c"]["differing"], rows["c"]["max_abs"]) == (["float32", "bfloat16"], 0, 0.0)


def test_a_file_is_compared_with_the_model_of_a_checkpoint(tmp_path: Path) -> None:
    model = {**state.parameters(), "emb.weight": state.parameters()["emb.weight"] + 1}
    row = only(found := diff(GOLDEN, tensors_file(tmp_path / "weights.safetensors", **model)))
    assert (row["name"], row["differing"], row["max_abs"]) == ("emb.weight", 600, 1.0)
    assert found["compared"] == {"model": 7}
    assert len(found["notes"]) == 1


@pytest.mark.parametrize(
    ("one", "other", "count", "most"),
    [
        ([0.0], [-0.0], 1, 0.0),
        ([math.nan, 1.0], [math.nan, 1.0], 0, 0.0),
        ([math.nan], [1.0], 1, math.inf),
        ([math.inf, 2.0], [-math.inf, 1.0], 2, math.inf),
        ([math.inf, 2.0], [math.inf, 1.5], 1, 0.5),
    ],
)
def test_bits_count_and_what_is_not_finite_is_infinitely_far(
    tmp_path: Path, one: list[float], other: list[float], count: int, most: float
) -> None:
    found = diff(
        tensors_file(tmp_path / "one", w=torch.tensor(one)), tensors_file(tmp_path / "other", w=torch.tensor(other))
    )
    assert found["same"] == (count == 0)
    if count:
        row = only(found)
        assert (row["differing"], row["max_abs"]) == (count, most)


def test_every_pattern_of_bits_can_be_compared(tmp_path: Path) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    one, other = (tensors_file(tmp_path / name, w=bits.view(torch.float16)) for name in ("one", "other"))
    assert diff(one, other)["same"]
    row = only(diff(one, tensors_file(tmp_path / "third", w=(bits ^ 1).view(torch.float16))))
    assert (row["differing"], row["max_abs"]) == (1 << 16, math.inf)


def test_damage_is_told_and_the_rest_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(shutil.copytree(GOLDEN, tmp_path / "step-0000000003"))
    os.truncate(path / "model.safetensors", 4000)
    found = diff(path, alone(tmp_path / "run"))
    assert {row["what"] for row in found["differences"]} == {"unreadable"}
    assert not found["good"]
    assert inspect_ckpt.run(path, other=GOLDEN, json=True) == 3
    assert json.loads(capsys.readouterr().out)["schema_version"] == 1


def test_without_a_manifest_the_model_can_still_be_compared(tmp_path: Path) -> None:
    path = Path(shutil.copytree(GOLDEN, tmp_path / "step-0000000003"))
    (path / "manifest.json").write_text("{}")
    found = diff(path, GOLDEN)
    assert (found["same"], found["good"]) == (True, False)
    assert found["compared"] == {"model": 7}
    assert str(path / "manifest.json") in found["problems"][0]


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    paths = [put(tmp_path, step) for step in (2, 3)]
    assert diff(tmp_path, paths[1])["same"]
    with pytest.raises(CheckpointError, match="does not exist"):
        diff(tmp_path, tmp_path / "nothing")
    with pytest.raises(UsageError, match="--stats"):
        inspect_ckpt.run(tmp_path, other=paths[0], stats=True)


@settings(max_examples=50, deadline=None)
@given(cuts=st.lists(st.integers(0, 23), max_size=5), nbytes=st.integers(1, 30))
def test_chunks_are_the_same_however_the_tensor_is_cut(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], nbytes: int
) -> None:
    root = tmp_path_factory.getbasetemp()
    (root / "all").write_bytes(bytes(range(24)))
    edges = sorted({0, *cuts, 24})
    pieces = [Piece(a, b, 0, "all", Entry("U8", (b - a,), a, b)) for a, b in pairwise(edges)]
    assert Whole("w", "U8", (24,), pieces).gaps() == []
    runs = [bytes(run) for run in chunks(root, pieces, nbytes)]
    assert b"".join(runs) == bytes(range(24))
    assert all(len(run) == nbytes for run in runs[:-1])


def test_an_element_is_told_by_its_index() -> None:
    assert [list(index_of(element, (2, 3))) for element in range(6)] == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert list(index_of(0, ())) == []
