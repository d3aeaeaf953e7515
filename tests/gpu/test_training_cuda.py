"""A whole run on a CUDA device: a world of one over NCCL against plain torch with fused AdamW, and its batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardrun.data.loader import MicroBatchLoader
from tests.support.plain_run import differing_from_plain_torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch.cuda.is_available() is False"),
]


@pytest.mark.parametrize("precision", [{}, {"autocast": "bf16"}, {"matmul": "high"}])
def test_a_run_on_the_device_is_a_loop_of_plain_torch_with_fused_adamw(
    tmp_path: Path, precision: dict[str, str]
) -> None:
    assert differing_from_plain_torch(tmp_path, "nccl", "cuda", **precision) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_in_page_locked_memory(workers: int) -> None:
    samples = [(torch.full((3,), float(index)), {"label": torch.tensor(index)}) for index in range(8)]
    loader = MicroBatchLoader(
        samples, seed=0, rank=0, world_size=1, micro_batch_size=2, global_batch_size=4, workers=workers, pin=True
    )
    for _, share in loader.windows(0, 8):
        for _, (values, more) in share:
            assert values.is_pinned()
            assert more["label"].is_pinned()
    loader.close()
