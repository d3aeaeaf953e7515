"""bench on a CUDA device: a world of one against a plain torch loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardrun.bench.contenders import COMPUTE, PLAIN, SHARDRUN
from shardrun.bench.standing import rows
from tests.ranks.test_bench import NUMEL, measured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch.cuda.is_available() is False"),
]


def test_all_of_one_rank_train_the_same_and_memory_is_that_of_the_device(tmp_path: Path) -> None:
    path = str(tmp_path / "reference.safetensors")
    found = {PLAIN: [measured(tmp_path, PLAIN, 1, save_parameters=path)], COMPUTE: [measured(tmp_path, COMPUTE, 1)]}
    found[SHARDRUN] = [measured(tmp_path, SHARDRUN, 1, compare_parameters=path)]
    table = rows([COMPUTE, SHARDRUN, PLAIN], found)
    assert [row.status for row in table] == ["floor", "valid", "reference"]
    assert all(found[row.name][0].ranks[0]["device"].startswith("cuda") for row in table)
    # Model, gradients and state at least, and none of what the process holds on the host.
    assert all(4 * 4 * NUMEL <= (row.peak_bytes or 0) < 100e6 for row in table)
