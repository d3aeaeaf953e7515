"""A saver without torch: small slices of made-up state, whose every byte follows from the step."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, cast

from blake3 import blake3

from shardrun.checkpoint.manifest import read_manifest
from shardrun.checkpoint.plan import Plan, PlannedFile
from shardrun.checkpoint.protocol import run_stages, stages_of_save
from shardrun.checkpoint.retention import Retention
from shardrun.checkpoint.store import MODEL_FILE, record_file, scan, state_file
from shardrun.records.header import TensorBytes, encode_header

_SHAPES = {"bias": (3,), "weight": (4, 3)}


class Alone:
    """As much of a Communicator as a save in a world of one needs."""

    rank, world_size, is_poisoned = 0, 1, False

    def agree(self, tag: str, value: Any = None, error: Exception | None = None) -> list[Any]:
        if error is not None:
            raise error
        return [json.loads(json.dumps(value))]


def put(run_dir: Path, step: int, **retention: int) -> Path:
    """Save the state of `step`."""
    comm = cast(Any, Alone())
    return run_stages(comm, stages_of_save(run_dir, comm, lambda: plan(step), Retention(**retention), None)).path


def plan(step: int) -> Plan:
    """What is saved of `step`: a model, a record and a state, a few tensors each."""
    contract = [
        {"path": path, "shape": list(shape), "dtype": "float32", "trainable": True, "alias": index}
        for index, (path, shape) in enumerate(_SHAPES.items())
    ]
    sections = {
        "run": "saver", "attempt": "1", "parent": None, "counters": {"updates": step}, "param_sha256": "0" * 64,
        "step": step, "topology": {"world_size": 1}, "groups": {"default": {"contract": contract}},
        "model": {path: ["float32", list(shape)] for path, shape in _SHAPES.items()}, "aliases": {},
    }  # fmt: skip
    numel = {"bias": 3, "weight": 12}
    fragments = {path: [0, count] for path, count in numel.items()}
    moments = {f"{path}/exp_avg": _tensor(step, path, (count,)) for path, count in numel.items()}
    record = {"role": "record", "rank": 0, "group": "default", "fragments": fragments, "meta": {}}
    files = [
        _file(MODEL_FILE, {p: _tensor(step, p, s) for p, s in _SHAPES.items()}, {"role": "model", "rank": 0}),
        _file(record_file("default", 0, 1), moments, record),
        _file(state_file(0, 1), {"rng/python": _tensor(step, "rng", (5,))}, {"role": "state", "rank": 0}),
    ]
    return Plan(step, files, sections, sum(file.nbytes for file in files))


def _file(path: str, tensors: dict[str, TensorBytes], entry: dict[str, Any]) -> PlannedFile:
    return PlannedFile(path, tensors, {"format": "pt"}, entry)


def _tensor(step: int, name: str, shape: tuple[int, ...]) -> TensorBytes:
    count = 4 * (shape[0] if len(shape) == 1 else shape[0] * shape[1])
    data = hashlib.shake_128(f"{step} {name} {shape}".encode()).digest(count)
    return TensorBytes("F32", shape, lambda: data)


def held(run_dir: Path) -> list[int]:
    """The steps whose checkpoints are there, newest first. AssertionError unless each is whole, to the last byte."""
    found = scan(run_dir)
    for one in found:
        assert one.complete, one.why
        listed = {entry["path"]: entry for entry in read_manifest(one.path)[0]["files"]}
        files = plan(one.step).files
        assert listed.keys() == {file.path for file in files}
        for file in files:
            raw = (one.path / file.path).read_bytes()
            head, order = encode_header(file.tensors, file.metadata)
            assert raw == head + b"".join(bytes(file.tensors[name].data()) for name in order), file.path
            assert listed[file.path]["hash"] == f"blake3:{blake3(raw).hexdigest()}"
    return [one.step for one in found]
