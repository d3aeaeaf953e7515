"""metrics.jsonl is strict JSON, whatever a loss comes to."""

from __future__ import annotations

import json
import math
from io import FileIO
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch

from shardrun.run.metrics import MetricsFile, plain, read_rows


def _refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path, 0)
    assert file.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "per_class": [0.5, -math.inf]}) is None
    file.close()
    (line,) = file.path.read_text().splitlines()
    expected = {"step": 1, "loss": None, "grad_norm": None, "per_class": [0.5, None]}
    assert json.loads(line, parse_constant=_refuse) == expected
    assert read_rows(file.path) == [expected]


def test_numbers_of_numpy_and_torch_are_plain_ones() -> None:
    values = {
        "a": np.float32(0.5),
        "b": torch.tensor(0.25),
        "c": np.int64(3),
        "d": np.float64("nan"),
        "e": True,
        "f": "x",
    }
    assert plain(values) == {"a": 0.5, "b": 0.25, "c": 3, "d": None, "e": True, "f": "x"}
    assert [type(value) for value in plain(values).values()] == [float, float, int, type(None), bool, str]


def _written(folder: Path, *steps: int, after: int = 0, later: bool = False) -> MetricsFile:
    file = MetricsFile(folder, after, later=later)
    for step in steps:
        assert file.write({"step": step, "loss": 0.5}) is None
    return file


def _steps(folder: Path) -> list[int]:
    return [row["step"] for row in read_rows(folder / "metrics.jsonl")]


def test_a_full_disk_costs_rows_and_one_warning(tmp_path: Path) -> None:
    file = _written(tmp_path, 1)
    assert file._file is not None
    file._file.close()
    file._file = FileIO("/dev/full", "w")
    assert file.write({"step": 2}) == f"{file.path}: No space left on device; training goes on without metrics"
    assert file.write({"step": 3}) is None
    file.close()
    assert _steps(tmp_path) == [1]


def test_a_bad_line_hides_no_other_and_only_the_last_one_goes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"st\xff\n7\n{"step":2}\n{"step":3}\n{"ste')
    assert _steps(tmp_path) == [1, 2, 3]
    _written(tmp_path, 4, after=3).close()
    assert path.read_bytes() == b'{"step":1}\n{"st\xff\n7\n{"step":2}\n{"step":3}\n{"step":4,"loss":0.5}\n'


def test_rows_of_later_steps_go_where_no_checkpoint_holds_them(tmp_path: Path) -> None:
    _written(tmp_path, 1, 2, 3, 4).close()
    _written(tmp_path, 3, after=2).close()
    assert _steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("killed", [False, True])
def test_rows_of_a_later_checkpoint_come_back_unless_this_start_saves(tmp_path: Path, killed: bool) -> None:
    _written(tmp_path, *range(1, 9)).close()
    file = _written(tmp_path, 3, 4, after=2, later=True)
    assert _steps(tmp_path) == [1, 2, 3, 4]
    assert file._file is not None
    file._file.close()
    if not killed:
        file.close()
        assert _steps(tmp_path) == list(range(1, 9))
    _written(tmp_path, 9, after=8).close()
    assert _steps(tmp_path) == list(range(1, 10))
    file = _written(tmp_path, 3, after=2, later=True)
    file.saved()
    file.close()
    assert _steps(tmp_path) == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_file_that_ends_with_the_row_of_the_step_lacks_its_validation(tmp_path: Path) -> None:
    file = _written(tmp_path, 1, 2)
    file.write({"step": 2, "val_loss": 1.0})
    file.close()
    found = []
    for after in (2, 1):
        file = _written(tmp_path, after=after)
        found.append(file.lacks_validation)
        file.close()
    assert found == [False, True]
