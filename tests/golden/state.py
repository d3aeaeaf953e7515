"""A small training state with everything odd in it: ties, frozen and empty tensors, scalars, bf16 with masters, cuts.

It is described whole, and cut for any world size by the real layout, so that what was saved at one world size can be
compared with what was saved at another. Every value is a function of the seed alone.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from shardrun.checkpoint.snapshot import Snapshot, model_specs
from shardrun.records.record import RECORD_VERSION, Zero2Record
from shardrun.records.tensors import host_bytes
from shardrun.shard.contract import Contract, ParameterSpec
from shardrun.shard.layout import Entry, FlatLayout, plan_layout

GROUP = "default"
TIED = {"head.weight": "emb.weight"}
TRAINABLE: dict[str, tuple[int, ...]] = {
    "blocks.0.weight": (7,),
    "blocks.1.weight": (5, 1),
    "emb.weight": (30, 20),
    "half.weight": (300, 3),
    "temperature": (),
}
FROZEN: dict[str, tuple[int, ...]] = {"frozen.empty": (0, 4), "frozen.weight": (2, 3)}
HALF = "half.weight"


def parameters(seed: int = 0) -> dict[str, Tensor]:
    """Path -> value; one name per tensor."""
    shapes = {**TRAINABLE, **FROZEN}
    made = {path: _numbers(seed, path, shape) for path, shape in shapes.items()}
    return {path: value.to(torch.bfloat16) if path == HALF else value for path, value in made.items()}


def optimizer_state(seed: int = 0) -> dict[str, Tensor]:
    """ "<path>/<key>" -> the whole state of a parameter, flattened; scalars 0-dim."""
    state = {}
    for path, shape in TRAINABLE.items():
        for key in ("exp_avg", "exp_avg_sq", *(("master",) if path == HALF else ())):
            state[f"{path}/{key}"] = _numbers(seed, f"{path}/{key}", shape).reshape(-1)
        state[f"{path}/step"] = torch.tensor(float(seed + 3))
    return state


def _numbers(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    # Integers and a division by a power of two: the same bits with every version of torch, for ever.
    start = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:2], "big")
    numbers = torch.arange(start, start + math.prod(shape)) * 40_503 % 8191
    return (numbers.float() / 64 - 64).reshape(shape)


def contract() -> Contract:
    """The contract of these parameters, the tie included."""
    paths = sorted([*TRAINABLE, *FROZEN, *TIED])
    values = parameters()
    return Contract.of(
        ParameterSpec(
            path,
            tuple(values[TIED.get(path, path)].shape),
            "bfloat16" if path == HALF else "float32",
            TIED.get(path, path) in TRAINABLE,
            paths.index(TIED.get(path, path)),
        )
        for path in paths
    )


def layout(bucket_numel: int = 512) -> FlatLayout:
    """Several buckets, so that parameters begin at other places than zero of a slice."""
    specs = contract()
    return plan_layout([Entry(s.path, s.numel, s.dtype, 0) for s in specs.distinct() if s.trainable], bucket_numel)


def record(rank: int, world_size: int, seed: int = 0) -> Zero2Record:
    """What `SelectedZero2.to_record` would give on this rank."""
    fragments = layout().fragments(rank, world_size)
    tensors = {}
    for name, whole in optimizer_state(seed).items():
        path = name.rpartition("/")[0]
        if path in fragments:
            start, stop = fragments[path]
            tensors[name] = whole[start:stop].clone() if whole.dim() else whole.clone()
    meta = {
        "version": RECORD_VERSION,
        "group": GROUP,
        "rank": rank,
        "world_size": world_size,
        "step_count": seed + 3,
        "contract": contract().to_json(),
        "layout": layout().to_json(),
        "optimizer": {"name": "adamw", "masters": True, "groups": [{"betas": [0.9, 0.999], "weight_decay": 0.01}]},
        "numerics": {"seam": "exchange", "threads": 1},
        "fragments": {path: list(held) for path, held in fragments.items()},
    }
    return Zero2Record(meta, tensors)


def digest(tensors: dict[str, Tensor]) -> str:
    """sha256 over names and bytes."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + bytes(host_bytes(tensors[name])))
    return found.hexdigest()


def snapshot(rank: int = 0, world_size: int = 1, step: int = 3, seed: int = 0, **sections: Any) -> Snapshot:
    """This rank's state at `step`; `sections` replace parts of the manifest."""
    model = parameters(seed)
    manifest = {
        "run": "golden",
        "attempt": 1,
        "counters": {"tokens": 100 * step, "updates": step},
        "numerics": {"torch": "any"},
        "param_sha256": digest(model),
        **sections,
    }
    rank_state = {"rng.torch": torch.arange(rank, rank + 16, dtype=torch.uint8), "position": torch.tensor(step)}
    return Snapshot(step, manifest, model, TIED, {GROUP: record(rank, world_size, seed)}, rank_state)


def expected(rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """What a run over these parameters expects of a checkpoint."""
    meta = record(rank, world_size).meta
    return {
        "groups": {GROUP: {key: meta[key] for key in ("contract", "layout", "optimizer", "numerics")}},
        "model": model_specs(snapshot(rank, world_size).model),
        "aliases": TIED,
        "numerics": {"torch": "any"},
    }


def same_tensors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Names that are missing, too many, or not equal in dtype, shape or any bit."""
    wrong = sorted(found.keys() ^ wanted.keys())
    for name in found.keys() & wanted.keys():
        one, other = found[name], wanted[name]
        if one.dtype != other.dtype or one.shape != other.shape or bytes(host_bytes(one)) != bytes(host_bytes(other)):
            wrong.append(name)
    return wrong
