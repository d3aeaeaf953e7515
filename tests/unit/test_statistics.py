"""The statistics of tensors: against plain sums, over any cut into chunks, and in little memory."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardrun.checkpoint.inspect import inspect
from shardrun.checkpoint.statistics import Statistics
from shardrun.records.elements import decode
from shardrun.records.header import TensorBytes, write_safetensors
from shardrun.records.tensors import host_bytes

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
}


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(width=16, allow_nan=True, allow_infinity=True), max_size=40),
    code=st.sampled_from(sorted(DTYPES)),
    cut=st.integers(1, 9),
)
def test_they_are_those_of_the_elements_however_they_are_cut(values: list[float], code: str, cut: int) -> None:
    tensor = torch.tensor(values, dtype=torch.float64).to(DTYPES[code])
    raw, size = bytes(host_bytes(tensor)), tensor.element_size()
    found = Statistics(code)
    for at in range(0, len(raw), cut * size):
        found.add(raw[at : at + cut * size])
    got = found.to_json()
    wide = (tensor.abs() if code == "C64" else tensor).to(torch.float64).tolist()
    finite = [one for one in wide if math.isfinite(one)]
    bad = [place for place, one in enumerate(wide) if not math.isfinite(one)]
    assert (got["elements"], got["zeros"], got["nonfinite"]) == (len(wide), wide.count(0.0), len(bad))
    assert got["first_nonfinite"] == (bad[0] if bad else None)
    assert got["norm"] == pytest.approx(math.sqrt(math.fsum(one * one for one in finite)), rel=1e-6)
    assert got["min"] == (pytest.approx(min(finite), rel=1e-6) if finite else None)
    assert got["max"] == (pytest.approx(max(finite), rel=1e-6) if finite else None)


@pytest.mark.parametrize("code", ["I64", "U8", "BOOL", "I16"])
def test_integers_keep_their_extremes(code: str) -> None:
    raw = np.array([0, 1, 1, 0], {"I64": "<i8", "U8": "u1", "BOOL": "u1", "I16": "<i2"}[code]).tobytes()
    found = Statistics(code)
    found.add(raw)
    assert found.to_json() == {
        "elements": 4, "norm": math.sqrt(2), "min": 0, "max": 1, "zeros": 2, "nonfinite": 0, "first_nonfinite": None
    }  # fmt: skip


def test_every_bf16_is_decoded_as_torch_does() -> None:
    raw = np.arange(1 << 16, dtype="<u2").tobytes()
    mine = decode("BF16", raw)
    assert mine is not None
    wanted = torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).float().numpy()
    assert np.array_equal(mine.view("<u4"), wanted.view("<u4"))


def test_eight_bit_floats_are_shown_without_statistics(tmp_path: Path) -> None:
    file = tmp_path / "f8.safetensors"
    write_safetensors(file, {"w": TensorBytes("F8_E4M3", (3,), lambda: b"\x38\x00\x01")}, {})
    (row,) = inspect(file, stats=True)["tensors"]
    assert (row["dtype"], row["stats"]) == ("float8_e4m3fn", None)


MEASURE = """
import resource, sys
from pathlib import Path
from shardrun.checkpoint.inspect import inspect
import numpy
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
inspect(Path(sys.argv[1]), stats=True)
before = peak()
found = inspect(Path(sys.argv[2]), stats=True)
print(peak() - before, found["tensors"][0]["stats"]["elements"], "torch" in sys.modules)
"""


def test_a_tensor_of_any_size_takes_the_memory_of_a_chunk(tmp_path: Path) -> None:
    sizes = {"small": 1 << 20, "large": 64 << 20}
    for name, size in sizes.items():
        tensor = TensorBytes("BF16", (size // 2,), partial(bytes, size))
        write_safetensors(tmp_path / name, {"w": tensor}, {}, fsync=False)
    told = subprocess.run(
        [sys.executable, "-c", MEASURE, *(str(tmp_path / name) for name in sizes)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert told[1:] == [str(32 << 20), "False"]
    assert int(told[0]) < 8 << 10  # KiB
