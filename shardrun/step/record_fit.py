"""Whether the records that all ranks bring make one state that fits this session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardrun.optim.state import MASTER
from shardrun.records.fit import violations
from shardrun.records.record import ShardRecord, record_key

Expected = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def judge(
    record: ShardRecord, meta: Mapping[str, Any], expected: Callable[[Mapping[str, Tensor]], Expected]
) -> tuple[list[str], dict[str, Any]]:
    """Misfits of one rank's record, and what the ranks have to hold alike; local, raises nothing.

    `meta` is what this session would write, `expected` gives the tensors that it wants for those that are there.
    """
    reading = "contract, layout or fragments"
    try:
        found = violations(record.meta, meta)
        steps = record.meta.get("step_count")
        if type(steps) is not int or steps < 0:
            found.append(f"step_count is {steps!r}, not a number of steps")
        reading = "tensors"
        found += [] if found else _tensor_misfits(record.tensors, expected(record.tensors))
        found += [] if found else _unlisted(record)
        if found:
            return found, {}
        scalars = {name: float(tensor).hex() for name, tensor in record.tensors.items() if tensor.dim() == 0}
        keys: dict[str, list[str]] = {path: [] for path in meta["fragments"]}
        for path, key in map(record_key, sorted(record.tensors)):
            keys[path].append(key)
    except Exception as error:  # a record may hold anything: whatever it breaks here, all ranks refuse it
        return [f"malformed {reading} ({type(error).__name__}: {error})"], {}
    return [], {"step_count": steps, "scalars": scalars, "keys": keys}


def joint_misfits(shared: Sequence[Mapping[str, Any]], named: Callable[[int], str]) -> list[str]:
    """What ranks hold differently though it is one and the same: the step count, one parameter's scalars and keys.

    `named` has the name of a rank by its number in the group.
    """
    found = []
    steps = [held["step_count"] for held in shared]
    if len(set(steps)) > 1:
        found.append("step counts differ: " + ", ".join(f"{named(rank)} at step {n}" for rank, n in enumerate(steps)))
    for name in sorted(set().union(*(held["scalars"] for held in shared))):
        sides = {rank: held["scalars"][name] for rank, held in enumerate(shared) if name in held["scalars"]}
        if len(set(sides.values())) > 1:
            told = ", ".join(f"{named(rank)} {float.fromhex(value)}" for rank, value in sides.items())
            found.append(f"{name} differs between its holders: {told}")
    for path in sorted(set().union(*(held["keys"] for held in shared))):
        keys = {rank: held["keys"][path] for rank, held in enumerate(shared) if path in held["keys"]}
        if len({tuple(own) for own in keys.values()}) > 1:
            told = ", ".join(f"{named(rank)} {' '.join(own) or 'none'}" for rank, own in keys.items())
            found.append(f"{path}: its holders have state of different kinds: {told}")
    return found


def _tensor_misfits(tensors: Mapping[str, Tensor], expected: Expected) -> list[str]:
    found = [f"{name}: in the record, not expected" for name in sorted(tensors.keys() - expected.keys())]
    for name, (shape, dtype) in sorted(expected.items()):
        if name not in tensors:
            found.append(f"{name}: expected, not in the record")
        elif tuple(tensors[name].shape) != shape or tensors[name].dtype != dtype:
            saved = f"{tuple(tensors[name].shape)} {tensors[name].dtype}"
            found.append(f"{name}: saved {saved}, expected {shape} {dtype}")
        elif tensors[name].is_meta or tensors[name].layout != torch.strided or tensors[name].is_quantized:
            kind = "without values (on the meta device)" if tensors[name].is_meta else f"of {tensors[name].layout}"
            found.append(f"{name}: saved a tensor {kind}, expected a dense one")
    return found


def _unlisted(record: ShardRecord) -> list[str]:
    """Where the tensors are not those that the record lists of what first updates made; older records list none."""
    found = []
    for path, names in record.meta.get("state", {}).items():
        listed = {f"{path}/{name}" for name in names}
        held = {name for name in record.tensors if record_key(name)[0] == path} - {f"{path}/{MASTER}"}
        found += [f"{name}: listed by the record, not in it" for name in sorted(listed - held)]
        found += [f"{name}: in the record, not listed by it" for name in sorted(held - listed)]
    return found
