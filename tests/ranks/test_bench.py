"""The contenders of bench on two ranks: all of them train the same model, and one that does not is found."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardrun.bench.contenders import COMPUTE, SHARDRUN
from shardrun.bench.rounds import Measured
from shardrun.bench.standing import DISTANCE_TOLERANCE, rows
from shardrun.run.tether import Tether
from tests.support.rank_process import Seat
from tests.support.ranks import run_ranks
from tests.support.training import RECIPES, document

NUMEL = 17 * 24 + 2 * (24 + 24 + 24 * 31 + 31 + 31 * 24 + 24)
WINDOWS = 3
_here = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def _rank(seat: Seat, job: Mapping[str, Any]) -> dict[str, Any]:
    os.environ |= {"RANK": str(seat.rank), "WORLD_SIZE": str(seat.world_size), "SHARDRUN_INIT_FILE": seat.init_file}
    os.environ |= {"LOCAL_RANK": str(seat.rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    warnings.simplefilter("default")  # torch warns of itself where its optimizers are imported
    from shardrun.bench.contender import run_contender

    return run_contender(job, Tether.from_env())


def measured(folder: Path, name: str, world_size: int = 2, cheats: str = "", **options: Any) -> Measured:
    sections = {
        "select": {"exclude": ["scale"]},
        "optimizer": {
            "name": "adamw", "lr": 1e-2, "weight_decay": 0.1,
            "options": [{"match": ["blocks.*.0.*"], "weight_decay": 0, "lr_scale": 0.5}],
        },
        "schedule": {"name": "linear", "warmup_steps": 2},
        "train": {"steps": 10, "micro_batch_size": 2, "global_batch_size": 4 * world_size, "max_grad_norm": 0.5},
        "data": {"shuffle": True},
    }  # fmt: skip
    config = document(folder, world_size, sections, str(RECIPES / "bench_net.py"), cheats=cheats)
    job = {"config": config, "run_dir": str(folder), "options": {"contender": name, "windows": WINDOWS, **options}}
    timeout_s = 300 if name == "deepspeed" else 60  # on its first use on a machine it compiles an extension
    return Measured(run_ranks(world_size, _rank, job, timeout_s=timeout_s, open_comm=False, debug="OFF"), warmup=1)


def reference(folder: Path, **more: Any) -> tuple[Measured, str]:
    path = str(folder / "reference.safetensors")
    return measured(folder, "ddp", save_parameters=path, **more), path


def test_all_train_the_same_model_and_hold_what_they_should(tmp_path: Path) -> None:
    ddp, path = reference(tmp_path)
    found = {"ddp": [ddp], COMPUTE: [measured(tmp_path, COMPUTE)]}
    for name in (SHARDRUN, "zero1", "fsdp2"):
        found[name] = [measured(tmp_path, name, compare_parameters=path)]
    table = {row.name: row for row in rows([COMPUTE, SHARDRUN, "ddp", "zero1", "fsdp2"], found)}
    assert {name: row.status for name, row in table.items()} == {
        COMPUTE: "floor", SHARDRUN: "valid", "ddp": "reference", "zero1": "valid", "fsdp2": "valid",
    }  # fmt: skip
    assert all(row.distance < 1e-3 for row in table.values() if row.distance is not None)
    whole, scalars = 4 * NUMEL, 4 * 13  # a step count of each tensor
    for name in (COMPUTE, "ddp"):
        assert table[name].gradient_bytes == whole
        assert table[name].state_bytes == 2 * whole + scalars
    half = table["zero1"].state_bytes
    assert half is not None
    assert whole <= half < 1.2 * whole
    assert whole / 2 <= (table["fsdp2"].gradient_bytes or 0) < 0.6 * whole
    assert all(row.peak_bytes > 100e6 and row.first_window_s > 0 for row in table.values())  # type: ignore[operator]
    assert ddp.weights == [4 * 2 * 8] * (WINDOWS - 1)
    assert len(ddp.steps_s) == WINDOWS - 1


@_here
def test_deepspeed_trains_the_same_model(tmp_path: Path) -> None:
    ddp, path = reference(tmp_path)
    found = {name: [ddp] for name in ("ddp", COMPUTE, SHARDRUN)}
    found["deepspeed"] = [measured(tmp_path, "deepspeed", compare_parameters=path)]
    row = rows([COMPUTE, "ddp", "deepspeed"], found)[-1]
    assert (row.status, row.why) == ("valid", None)
    assert row.distance is not None
    assert row.distance < 1e-3


def test_one_that_leaves_out_half_of_the_loss_is_void(tmp_path: Path) -> None:
    """Its mean loss is about the same, and the norm is clipped to the same: the parameters tell."""
    ours, path = reference(tmp_path, cheats="DistributedDataParallel")
    found = {name: [ours] for name in ("ddp", COMPUTE)}
    found[SHARDRUN] = [measured(tmp_path, SHARDRUN, compare_parameters=path)]
    row = rows([COMPUTE, SHARDRUN, "ddp"], found)[1]
    assert row.status == "void"
    assert row.distance is not None
    assert row.distance > DISTANCE_TOLERANCE
    assert "the parameters differ by" in (row.why or "")


def test_a_plain_loop_is_the_peer_of_one_rank(tmp_path: Path) -> None:
    path = str(tmp_path / "reference.safetensors")
    found = {"plain": [measured(tmp_path, "plain", 1, save_parameters=path)], COMPUTE: [measured(tmp_path, COMPUTE, 1)]}
    found[SHARDRUN] = [measured(tmp_path, SHARDRUN, 1, compare_parameters=path)]
    assert [row.status for row in rows([COMPUTE, SHARDRUN, "plain"], found)] == ["floor", "valid", "reference"]
