"""What a probe reads: every element of the live optimizer once, everything in a batch, every stream."""

from __future__ import annotations

import json
import random
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardrun.comm.communicator import Communicator
from shardrun.config.load import load
from shardrun.optim.kinds import OptionGroup
from shardrun.run.build import Built, build
from shardrun.run.probe import content_digest, live_leaves, write_probe
from shardrun.run.progress import Progress
from shardrun.run.tamper import scramble
from shardrun.shard.selection import select_parameters
from shardrun.step.data_parallel import SelectedDataParallel
from shardrun.step.zero1 import SelectedZero1
from shardrun.step.zero2 import SelectedZero2
from tests.support.verifying import verify_config


def built(folder: Path, **sections: Any) -> Built:
    return build(load(verify_config(folder, **sections)), Communicator.single())


# ---- optimizer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leaves_cover_every_trainable_element_once_in_its_place(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 3)).to(dtype)
    session = SelectedDataParallel(Communicator.single(), model, select_parameters(model, ["*"], ["1.bias"]))
    groups = [OptionGroup(frozenset({"0.bias", "1.weight"}), {"weight_decay": 0.0})]
    zero2 = SelectedZero2(session, "adamw", option_groups=groups, chunk_numel=256)
    leaves = list(live_leaves(zero2))
    assert len(leaves) == 8 + 1 + 1  # 2000 elements in pieces of 256
    seen: dict[str, int] = {}
    for leaf in leaves:
        assert leaf.start == seen.get(leaf.path, 0)
        whole = model.get_parameter(leaf.path).detach().reshape(-1)
        assert torch.equal(leaf.tensor.to(dtype), whole[leaf.start : leaf.start + leaf.tensor.numel()])
        assert leaf.is_master == (dtype == torch.bfloat16)
        assert leaf.state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        seen[leaf.path] = leaf.start + leaf.tensor.numel()
    assert seen == {path: model.get_parameter(path).numel() for path in ("0.weight", "0.bias", "1.weight")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leaves_of_owned_parameters_are_those_of_both_optimizers(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).to(dtype)
    session = SelectedDataParallel(Communicator.single(), model, select_parameters(model))
    groups = [OptionGroup(frozenset({"0.bias", "1.weight"}), {"weight_decay": 0.0})]
    leaves = {leaf.path: leaf for leaf in live_leaves(SelectedZero1(session, "muon", option_groups=groups))}
    assert leaves.keys() == dict(model.named_parameters()).keys()
    for path, leaf in leaves.items():
        whole = model.get_parameter(path).detach()
        assert torch.equal(leaf.tensor.to(dtype).reshape(-1), whole.reshape(-1))
        assert (leaf.start, leaf.is_master) == (0, dtype == torch.bfloat16)
        assert leaf.state.keys() == ({"momentum_buffer"} if whole.dim() == 2 else {"step", "exp_avg", "exp_avg_sq"})


def test_the_written_probe_holds_all_live_state(tmp_path: Path) -> None:
    one = built(tmp_path, precision={"parameters": "bf16"})
    write_probe(tmp_path, "now", one, Progress(step=2, updates=2, position=16, tokens=16), {"seen": [], "unread": []})
    tensors = load_file(tmp_path / "now.rank-0.safetensors")
    document = json.loads((tmp_path / "now.rank-0.json").read_text())
    paths = ["first.weight", "first.bias", "second.weight", "second.bias"]
    keys = ["fp32 masters", "optimizer exp_avg", "optimizer exp_avg_sq", "optimizer step"]
    assert tensors.keys() == {
        *(f"parameters/{path}" for path in paths),
        *(f"{key}/{path}@0" for key in keys for path in paths),
        *(f"buffers/{name}" for name in ("running_mean", "recent", "batches")),
        *("rng python/words", "rng numpy/key", "rng torch/cpu"),
    }
    assert torch.equal(tensors["parameters/first.weight"], one.model.get_parameter("first.weight"))
    sections = document["sections"]
    assert sections["counters"]["tokens"] == 16
    # The third update: the two of the warm-up are over, and the cosine has not fallen yet.
    assert sections["schedule"] == {"position": 2, "next_lr": [(0.01).hex(), sections["schedule"]["next_lr"][1]]}
    windows = sections["data position"]["next_windows"]
    assert [(w["epoch"], w["start"], w["stop"], len(w["samples"])) for w in windows] == [(0, 16, 24, 8), (0, 24, 26, 2)]
    assert document["attributes"] == {"calls": "0", "drop.inplace": "False", "drop.p": "0.25"} | {
        f"{layer}.{side}": str(size)
        for layer, sizes in (("first", (7, 15)), ("second", (15, 3)))
        for side, size in zip(("in_features", "out_features"), sizes, strict=True)
    }


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("rng python", random.random),
        ("rng python", lambda: random.gauss(0, 1)),
        ("rng numpy", np.random.random),
        ("rng numpy", np.random.standard_normal),
        ("rng torch", lambda: torch.rand(())),
    ],
)
def test_a_draw_from_a_stream_shows_in_that_stream_alone(tmp_path: Path, name: str, draw: Callable[[], object]) -> None:
    one = built(tmp_path)
    for moment in ("before", "after"):
        write_probe(tmp_path, moment, one, Progress(), {})
        draw()
    before, after = (load_file(tmp_path / f"{moment}.rank-0.safetensors") for moment in ("before", "after"))
    documents = [json.loads((tmp_path / f"{m}.rank-0.json").read_text())["sections"] for m in ("before", "after")]
    changed = {key.partition("/")[0] for key in before if not torch.equal(before[key], after[key])}
    changed |= {key for key in documents[0] if documents[0][key] != documents[1][key]}
    assert changed == {name}


def test_scrambling_leaves_no_value_and_no_stream_as_it_was(tmp_path: Path) -> None:
    one = built(tmp_path, precision={"parameters": "bf16"})
    padding = [bucket.own.clone() for bucket in one.groups[0].sharded.flat.buckets]
    write_probe(tmp_path, "before", one, Progress(), {})
    scramble(one, 7)
    write_probe(tmp_path, "after", one, Progress(), {})
    before, after = (load_file(tmp_path / f"{moment}.rank-0.safetensors") for moment in ("before", "after"))
    assert all(not torch.equal(tensor, after[key]) for key, tensor in before.items())
    for bucket, old in zip(one.groups[0].sharded.flat.buckets, padding, strict=True):
        gaps = torch.ones(bucket.own.numel(), dtype=torch.bool)
        for fragment in bucket.fragments:
            gaps[fragment.offset : fragment.offset + fragment.stop - fragment.start] = False
        assert torch.equal(bucket.own[gaps], old[gaps])  # a reduction relies on zeros there


# ---- batches -------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: torch.Tensor
    name: str = "a"


def test_every_value_in_a_batch_counts() -> None:
    x = torch.arange(6.0).view(2, 3)
    batches: list[Any] = [
        x,
        x.view(3, 2),
        x.double(),
        x + 1e-7,
        x.numpy(),
        [x],
        {"x": x},
        {"y": x},
        UserDict({"x": x, "n": 1}),
        Pair(x, 1),
        Pair(x, 2),
        Sample(x),
        Sample(x, "b"),
        1,
        1.0,
        True,
        "1",
        b"1",
        None,
        np.float32(1),
        {1, 2},
        {1, 3},
    ]
    unread: set[str] = set()
    digests = [content_digest(batch, unread) for batch in batches]
    assert len(set(digests)) == len(digests)
    assert digests == [content_digest(batch, unread) for batch in batches]
    assert unread == set()
    assert content_digest(x, unread) == content_digest(x.t().contiguous().t(), unread)  # strides are no content


def test_what_cannot_be_read_is_named() -> None:
    unread: set[str] = set()
    assert content_digest([1, object()], unread) == content_digest([1, object()], unread)
    assert unread == {"builtins.object"}
