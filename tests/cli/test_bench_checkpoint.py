"""`shardrun bench --checkpoint` as a program."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.launching import shardrun, started, write_config


def test_saves_and_loads_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    path = write_config(tmp_path, recipe="bench_net", train={"steps": 4, "micro_batch_size": 2, "global_batch_size": 4},
                        topology={"timeout_s": 40})  # fmt: skip
    with started(shardrun("bench", path, "--checkpoint", "--rounds", "2", "--json"), tmp_path) as program:
        assert program.wait(100) == 0, program.stderr
        assert program.left(2) == {}
    document = json.loads(program.stdout)
    found = document["contenders"]
    assert set(found) == {"shardrun", "torch.save", "DCP", "in the background"}
    assert all(found[name][f"{work}_s"]["min"] > 0 for name in ("shardrun", "DCP") for work in ("save", "load"))
    assert document["pause_of_save"] > 0
    assert not [name for name in os.listdir(tmp_path) if name.startswith("shardrun-")]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--checkpoint"], "no CONFIG is given"),
        (["configs/quickstart.yaml", "--checkpoint", "--world", "2,3"], "one number"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path: Path, words: list[str], told: str) -> None:
    with started(shardrun("bench", *words), tmp_path) as program:
        assert program.wait(20) == 2
    assert told in program.stderr
