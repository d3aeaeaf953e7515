"""A whole run on a CUDA device: a world of one over NCCL against plain torch with fused AdamW, and its batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardrun.data.loader import MicroBatchLoader
from shardrun.run.metrics import read_rows
from tests.support.launching import shardrun, started
from tests.support.plain_run import differing_from_plain_torch, small_gpt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch.cuda.is_available() is False"),
]


@pytest.mark.parametrize("precision", [{}, {"autocast": "bf16"}, {"matmul": "high"}])
def test_a_run_on_the_device_is_a_loop_of_plain_torch_with_fused_adamw(
    tmp_path: Path, precision: dict[str, str]
) -> None:
    assert differing_from_plain_torch(tmp_path, "nccl", "cuda", **precision) == []


def test_a_compiled_run_on_the_device_trains_alike_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    eager = _program(tmp_path / "eager", False, 0)
    straight = _program(tmp_path / "straight", True, 0)
    assert _program(tmp_path / "stopped", True, 75, 0) == straight
    assert straight == [pytest.approx(row, rel=1e-3) for row in eager]


def _program(folder: Path, compiled: bool, *codes: int) -> list[tuple[float, float]]:
    """Loss and norm of every step of the real program, stopped after step 2 where it is to end with 75."""
    folder.mkdir()
    config = small_gpt(folder, "nccl", train={"compile": compiled})
    config["recipe_args"]["dropout"] = 0.0  # compiled code draws other random numbers
    (folder / "run.yaml").write_text(json.dumps(config))
    for code in codes:
        stop = ["--stop-at", "2"] if code == 75 else []
        with started(shardrun("train", folder / "run.yaml", *stop), folder) as program:
            assert program.wait(170) == code, program.stderr
    return [(row["loss"], row["grad_norm"]) for row in read_rows(folder / "run" / "metrics.jsonl")]


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
