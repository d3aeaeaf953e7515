"""Comparing probes: one bit anywhere is found, and named with its step, rank, tensor, element and both values."""

from __future__ import annotations

import json
import math
import struct
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardrun.records.elements import value_text
from shardrun.records.header import TensorBytes, write_safetensors
from shardrun.run.comparison import Comparison, Difference, Moment

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]

TENSORS: Tensors = {
    "parameters/net.weight": ("F32", (2, 3), struct.pack("<6f", 1, 2, 3, 4, 5, 6)),
    "buffers/seen": ("I64", (), struct.pack("<q", 7)),
    "fp32 masters/net.weight@256": ("F32", (3,), struct.pack("<3f", 0.5, 0.25, 0.125)),
    "optimizer step/net.weight@256": ("F32", (), struct.pack("<f", 4)),
}
SECTIONS = {"counters": {"step": 4, "tokens": 32}, "schedule": {"position": 4, "next_lr": ["0x1p-3", "0x1p-4"]}}
SEEN = [{"step": step, "epoch": 0, "micro_batch": 0, "samples": [step, 9], "sha256": "ab"} for step in (1, 2, 3, 4)]


def probe(folder: Path, name: str, rank: int = 0, tensors: Tensors = TENSORS, **document: Any) -> Path:
    held = {key: TensorBytes(dtype, shape, partial(bytes, data)) for key, (dtype, shape, data) in tensors.items()}
    base = folder / f"{name}.rank-{rank}"
    write_safetensors(base.with_name(base.name + ".safetensors"), held, {}, fsync=False)
    whole = {"step": 4, "sections": SECTIONS, "attributes": {}, "unread": [], "seen": SEEN, **document}
    base.with_name(base.name + ".json").write_text(json.dumps(whole))
    return folder / name


def compared(folder: Path, tensors: Tensors = TENSORS, since: int = 0, **document: Any) -> Comparison:
    comparison = Comparison(1)
    other = probe(folder, "b", 0, tensors, **document)
    comparison.compare(Moment("after the restore", since, 4, probe(folder, "a"), other))
    return comparison


def only(comparison: Comparison) -> Difference:
    """The difference, which is the only one."""
    assert comparison.first is not None
    assert [row.first for row in comparison.rows if row.first is not None] == [comparison.first]
    return comparison.first


def test_equal_probes_are_equal_and_counted(tmp_path: Path) -> None:
    comparison = compared(tmp_path)
    assert comparison.first is None
    counts = {row.what: row.values for row in comparison.rows if row.values}
    assert counts == {
        "counters": 2,
        "schedule": 3,
        "data seen": 4,
        "parameters": 6,
        "buffers": 1,
        "fp32 masters": 3,
        "optimizer step": 1,
    }


@pytest.mark.parametrize("bit", [0, 31])
@pytest.mark.parametrize("element", range(6))
def test_one_bit_of_any_element_is_found(tmp_path: Path, element: int, bit: int) -> None:
    dtype, shape, data = TENSORS["parameters/net.weight"]
    changed = bytearray(data)
    changed[4 * element + bit // 8] ^= 1 << bit % 8
    found = only(compared(tmp_path, {**TENSORS, "parameters/net.weight": (dtype, shape, bytes(changed))}))
    assert (found.what, found.name, found.element, found.step, found.rank) == (
        "parameters",
        "net.weight",
        element,
        4,
        0,
    )
    assert found.straight == value_text("F32", data[4 * element :][:4])
    assert found.interrupted == value_text("F32", bytes(changed[4 * element :][:4]))


def test_an_element_is_counted_in_its_parameter_not_in_the_piece(tmp_path: Path) -> None:
    piece = ("F32", (3,), struct.pack("<3f", 0.5, 0.75, 0.125))
    found = only(compared(tmp_path, {**TENSORS, "fp32 masters/net.weight@256": piece}))
    assert (found.name, found.element) == ("net.weight", 257)
    assert (found.straight, found.interrupted) == ("0.25 (0x3e800000)", "0.75 (0x3f400000)")
    assert str(found) == (
        "step 4 (after the restore), rank 0: fp32 masters: net.weight, element 257: "
        "straight 0.25 (0x3e800000), interrupted 0.75 (0x3f400000)"
    )


def test_a_scalar_has_no_element(tmp_path: Path) -> None:
    found = only(compared(tmp_path, {**TENSORS, "buffers/seen": ("I64", (), struct.pack("<q", -8))}))
    assert (found.element, found.straight, found.interrupted) == (None, "7", "-8")


def test_minus_zero_differs_and_the_same_nan_does_not(tmp_path: Path) -> None:
    def held(values: tuple[float, ...]) -> Tensors:
        return {"parameters/w": ("F32", (2,), struct.pack("<2f", *values))}

    for number, (left, right, equal) in enumerate([((0.0, math.nan),) * 2 + (True,), ((0.0, 1), (-0.0, 1), False)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        comparison = Comparison(1)
        a, b = probe(folder, "a", 0, held(left)), probe(folder, "b", 0, held(right))
        comparison.compare(Moment("at the end", 0, 4, a, b))
        assert (comparison.first is None) == equal


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "dtype"])
def test_a_tensor_of_another_form_is_a_difference(tmp_path: Path, change: str) -> None:
    tensors = dict(TENSORS)
    dtype, shape, data = tensors.pop("parameters/net.weight")
    if change == "extra":
        tensors |= {"parameters/net.weight": (dtype, shape, data), "parameters/more": (dtype, shape, data)}
    elif change == "shape":
        tensors["parameters/net.weight"] = (dtype, (3, 2), data)
    elif change == "dtype":
        tensors["parameters/net.weight"] = ("I32", shape, data)
    found = only(compared(tmp_path, tensors))
    whole = "F32 [2, 3]"
    assert (found.straight, found.interrupted) == {
        "missing": (whole, "absent"),
        "extra": ("absent", whole),
        "shape": (whole, "F32 [3, 2]"),
        "dtype": (whole, "I32 [2, 3]"),
    }[change]


def test_integers_are_compared_by_their_dotted_names(tmp_path: Path) -> None:
    sections = {**SECTIONS, "schedule": {"position": 4, "next_lr": ["0x1p-3", "0x1p-5"]}}
    found = only(compared(tmp_path, sections=sections))
    assert (found.what, found.name, found.straight, found.interrupted) == (
        "schedule",
        "next_lr.1",
        '"0x1p-4"',
        '"0x1p-5"',
    )


@pytest.mark.parametrize(
    ("seen", "step", "name"),
    [
        ([*SEEN[2:3], {**SEEN[3], "samples": [4, 8]}], 4, "micro-batch 0: samples.1"),
        ([*SEEN[2:3], {**SEEN[3], "sha256": "ac"}], 4, "micro-batch 0: sha256"),
        (SEEN[2:3], 4, "micro-batch 0: step"),
        (SEEN[3:], 3, "micro-batch 0: step"),
        ([], 3, "micro-batch 0: step"),
        ([SEEN[2], SEEN[2], SEEN[3]], 4, "micro-batch 0: step"),
        ([*SEEN[2:], SEEN[3]], 4, "micro-batch 0: step"),
    ],
)
def test_the_data_of_the_legs_own_steps_is_compared(tmp_path: Path, seen: list[Any], step: int, name: str) -> None:
    found = only(compared(tmp_path, since=2, seen=seen))
    assert (found.what, found.step, found.name) == ("data seen", step, name)


def test_each_leg_is_held_against_the_data_of_its_own_steps(tmp_path: Path) -> None:
    comparison, straight = Comparison(1), probe(tmp_path, "a")
    comparison.compare(Moment("before the stop", 0, 2, straight, probe(tmp_path, "b", seen=SEEN[:2])))
    comparison.compare(Moment("after the restore", 2, 2, straight, probe(tmp_path, "c", seen=[])))
    comparison.compare(Moment("at the end", 2, 4, straight, probe(tmp_path, "d", seen=SEEN[2:])))
    assert comparison.first is None
    assert {row.what: row.values for row in comparison.rows}["data seen"] == 4


def test_the_rank_is_named_and_the_first_moment_counts(tmp_path: Path) -> None:
    comparison = Comparison(2)
    wrong = {**SECTIONS, "counters": {"step": 4, "tokens": 33}}
    late = {**TENSORS, "buffers/seen": ("I64", (), struct.pack("<q", 9))}
    for rank in range(2):
        straight = probe(tmp_path, "a", rank)
        early = probe(tmp_path, "b", rank, late if rank else TENSORS)
        both = probe(tmp_path, "c", rank, late, sections=wrong)
    comparison.compare(Moment("after the restore", 0, 4, straight, early))
    comparison.compare(Moment("at the end", 0, 9, straight, both))
    assert comparison.first is not None
    assert (comparison.first.what, comparison.first.rank, comparison.first.step) == ("buffers", 1, 4)
    rows = {row.what: row.first for row in comparison.rows if row.first is not None}
    assert {what: first.step for what, first in rows.items()} == {"counters": 9, "buffers": 4}


def test_plain_attributes_are_a_hint_and_no_difference(tmp_path: Path) -> None:
    comparison = compared(tmp_path, attributes={"net.calls": "3"}, unread=["recipe.Box"])
    assert comparison.first is None
    assert len(comparison.hints) == 2
    assert "net.calls" in comparison.hints[0]
    assert "register_buffer" in comparison.hints[0]
    assert comparison.hints[1] == "batches hold objects of recipe.Box, whose content was not compared"


def test_metrics_are_compared_but_for_their_times() -> None:
    rows = [{"step": 1, "loss": 0.1, "seconds": 2.0}, {"step": 2, "loss": math.nan, "tokens_per_s": 5}]
    again = [{"step": 1, "loss": 0.1, "seconds": 3.0}, {"step": 2, "loss": math.nan}]
    comparison = Comparison(1)
    comparison.compare_metrics("at the end", rows, again)
    assert comparison.first is None
    assert {row.what: row.values for row in comparison.rows}["metrics"] == 4
    comparison.compare_metrics("at the end", rows, [again[0], {"step": 2, "loss": 0.30000000000000004}])
    found = only(comparison)
    assert (found.what, found.step, found.name) == ("metrics", 2, "loss")
    assert (found.straight, found.interrupted) == ("NaN", "0.30000000000000004")


@pytest.mark.parametrize(("kept", "step"), [(1, 2), (3, 3)])
def test_a_row_too_few_or_too_many_is_a_difference(kept: int, step: int) -> None:
    rows = [{"step": 1, "loss": 0.1}, {"step": 2, "loss": 0.2}, {"step": 3, "loss": 0.3}]
    comparison = Comparison(1)
    comparison.compare_metrics("at the end", rows[:2], rows[:kept])
    assert only(comparison).step == step


@pytest.mark.parametrize(
    ("dtype", "raw", "text"),
    [
        ("BF16", b"\x80\x3f", "1.0 (0x3f80)"),
        ("F16", b"\x00\x3c", "1.0 (0x3c00)"),
        ("F64", struct.pack("<d", 0.1), "0.1 (0x3fb999999999999a)"),
        ("F32", struct.pack("<f", 0.1), "0.1 (0x3dcccccd)"),
        ("F32", struct.pack("<f", math.inf), "inf (0x7f800000)"),
        ("BOOL", b"\x01", "True"),
        ("U8", b"\xff", "255"),
        ("I16", b"\xff\xff", "-1"),
        ("F8_E4M3", b"\x38", "F8_E4M3 0x38"),
    ],
)
def test_values_are_shown_with_their_bits(dtype: str, raw: bytes, text: str) -> None:
    assert value_text(dtype, raw) == text
