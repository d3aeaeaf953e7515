"""metrics.jsonl is strict JSON, whatever a loss comes to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NoReturn

import numpy as np
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
