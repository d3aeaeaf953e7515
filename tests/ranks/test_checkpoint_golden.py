"""The committed checkpoint of format 1 loads for ever."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardrun.checkpoint.inspect import inspect
from shardrun.checkpoint.load import load
from shardrun.comm.communicator import Communicator
from shardrun.records.tensors import host_bytes
from tests.golden import state
from tests.golden.make import STEP, WORLD_SIZE, table
from tests.support.ranks import run_ranks

FOLDER = Path(__file__).parents[1] / "golden" / "format-1"
CHECKPOINT = FOLDER / "checkpoints" / "step-0000000003"


def load_golden(comm: Communicator, path: Path) -> list[dict[str, Any]]:
    """[model, optimizer state of this rank, own state] as plain lists, for the parent to put together."""
    expected = {key: value for key, value in state.expected(comm.rank, comm.world_size).items() if key != "groups"}
    found = load(path, comm, expected)
    assert found is not None
    assert found.step == STEP
    record = found.records[state.GROUP]
    pieces = {n: [*record.meta["fragments"][n.rpartition("/")[0]], t.tolist()] for n, t in record.tensors.items()}
    model = {name: hashlib.sha256(bytes(host_bytes(tensor))).hexdigest() for name, tensor in found.model.items()}
    return [model, pieces, {name: tensor.tolist() for name, tensor in found.rank_state.items()}, record.meta]


def test_format_1_loads_with_the_bits_it_was_made_of() -> None:
    answers = run_ranks(WORLD_SIZE, load_golden, FOLDER)
    whole = state.optimizer_state()
    held = dict.fromkeys(whole, 0)
    for rank, (model, pieces, rank_state, meta) in enumerate(answers):
        for name, tensor in state.parameters().items():
            assert model[name] == hashlib.sha256(bytes(host_bytes(tensor))).hexdigest()
        assert model["head.weight"] == model["emb.weight"]
        for name, (start, stop, values) in pieces.items():
            wanted = whole[name] if whole[name].dim() == 0 else whole[name][start:stop]
            assert values == wanted.tolist(), name
            held[name] += stop - start
        assert rank_state == {"rng.torch": list(range(rank, rank + 16)), "position": STEP}
        assert (meta["rank"], meta["world_size"], meta["step_count"], meta["version"]) == (rank, WORLD_SIZE, 3, 1)
    assert {name: count for name, count in held.items() if whole[name].dim()} == {
        name: tensor.numel() for name, tensor in whole.items() if tensor.dim()
    }


def test_format_1_is_shown_as_it_was_when_it_was_written() -> None:
    found = inspect(CHECKPOINT, verify=True)
    assert found["problems"] == []
    assert table(CHECKPOINT) == json.loads((FOLDER / "tensors.json").read_text())
    assert found["counters"] == {"tokens": 300, "updates": 3}


@pytest.mark.parametrize("name", ["emb.weight/exp_avg", "half.weight/master"])
def test_the_table_of_format_1_is_that_of_the_state(name: str) -> None:
    """The committed hashes against the state itself, so that neither can drift alone."""
    tensor = state.optimizer_state()[name]
    wanted = hashlib.sha256(bytes(host_bytes(tensor.to(torch.float32)))).hexdigest()
    assert json.loads((FOLDER / "tensors.json").read_text())[name][2] == wanted
