"""A checkpoint taken up by other replica sets than those that saved it: every rank picks what it holds now.

Records are known by path and element range, so that a rank finds the state of its parameters in whichever files have
them. Nothing is written; see `reshard` for a checkpoint of the whole world, which is cut again as files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardrun.checkpoint.load import Loaded
from shardrun.checkpoint.manifest import read_manifest
from shardrun.checkpoint.read import RankFiles, read_model, read_verified
from shardrun.checkpoint.reshard import RESHARDED
from shardrun.checkpoint.together import together
from shardrun.comm.communicator import Communicator
from shardrun.errors import CheckpointError
from shardrun.records.fit import differences, holds_whole
from shardrun.records.record import record_of

_SPEC = ("shape", "dtype", "trainable")


@dataclass
class _Files:
    """The record files of a checkpoint, each read and hashed once."""

    checkpoint: Path
    manifest: Mapping[str, Any]
    _read: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def holders(self, path: str, start: int, stop: int) -> list[tuple[int, int, dict[str, Any]]]:
        """(start, stop, entry) of the files that have elements of [start, stop) of a parameter, in their order."""
        found = []
        for entry in self.manifest["files"]:
            held = entry.get("fragments", {}).get(path) if entry["role"] == "record" else None
            if held is not None and max(start, held[0]) < min(stop, held[1]):
                found.append((held[0], held[1], entry))
        return sorted(found, key=lambda one: one[:2])

    def tensors(self, entry: Mapping[str, Any]) -> dict[str, Tensor]:
        """All tensors of a file; CheckpointError unless it is as registered."""
        if entry["path"] not in self._read:
            self._read[entry["path"]] = read_verified(self.checkpoint, entry)[1]
        return self._read[entry["path"]]


def load_regrouped(
    checkpoint: Path,
    comm: Communicator,
    metas: Mapping[str, Mapping[str, Any]],
    names: Collection[str],
    numerics: Mapping[str, Any],
) -> Loaded:
    """What this rank needs of a checkpoint: the model's tensors `names`, and records for its sessions.

    `metas`: their `record_meta()`, by the names of their records; `numerics`: what has to be as it was saved. Every
    rank of the world calls it; nothing is changed. CheckpointError on all ranks if a file is damaged, or a parameter,
    an optimizer or a number does not fit.
    """
    loaded: list[Loaded] = []

    def look() -> dict[str, list[str]]:
        manifest, _ = read_manifest(checkpoint)
        model = RankFiles()
        read_model(model, checkpoint, manifest, names)
        model.model |= {alias: model.model[n] for alias, n in manifest["aliases"].items() if n in model.model}
        misfits = [f"model: {name} is not in the checkpoint" for name in sorted({*names} - {*model.model})]
        saved = {key: manifest.get("numerics", {}).get(key) for key in numerics}
        unlike = [f"{line} (--accept-changes)" for line in differences(saved, dict(numerics), "numerics")]
        found = [*model.problems, *misfits, *unlike]
        files = _Files(checkpoint, manifest)
        records, sections = {}, {}
        for name, meta in metas.items():
            sections[name], problems = _section(manifest, name, meta)
            found += problems
            if not found:
                records[name] = record_of(*_collected(files, meta))
        state = _state(checkpoint, manifest, comm.rank) if not found else {}
        sealed = {**manifest, "groups": sections, RESHARDED: {"world_size": manifest["topology"]["world_size"]}}
        loaded.append(
            Loaded(manifest["step"], checkpoint, sealed, model.model, records, state, model_files=model.model_files)
        )
        return {"problems": found}

    problems = [line for vote in together(comm, "regroup", look) for line in vote["problems"]]
    if problems:
        told = "\n  ".join([f"checkpoint {checkpoint} does not fit this run:", *dict.fromkeys(problems)])
        raise CheckpointError(told)
    return loaded[0]


def _section(manifest: Mapping[str, Any], name: str, meta: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A group's section as this world would have saved it, and what of it does not fit."""
    found, optimizers = [], []
    wanted = {spec["path"]: spec for spec in meta["contract"]}
    for group in manifest["groups"].values():
        saved = {spec["path"]: spec for spec in group["contract"]}
        for path in sorted(wanted.keys() & saved.keys()):
            for key in _SPEC:
                if saved[path][key] != wanted[path][key]:
                    found.append(f"{path}: {key} saved {saved[path][key]}, this run {wanted[path][key]}")
        if wanted.keys() & saved.keys():
            optimizers.append({**group["optimizer"], **_owners(meta)})
    held = {spec["path"] for group in manifest["groups"].values() for spec in group["contract"]}
    found += [f"{path}: this run trains it, the checkpoint does not" for path in sorted(wanted.keys() - held)]
    for other in optimizers[1:]:
        found += [f"{name} of several groups: {line}" for line in differences(optimizers[0], other, "optimizer")]
    return {**{key: meta[key] for key in ("contract", "layout")}, "optimizer": (optimizers or [{}])[0]}, found


def _owners(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Those of this run, which a regrouped record is for."""
    return {"owners": meta["optimizer"]["owners"]} if "owners" in meta["optimizer"] else {}


def _collected(files: _Files, meta: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Meta and tensors of a record with the fragments of `meta`, out of those in the files."""
    tensors: dict[str, Tensor] = {}
    counts: set[int] = set()
    listed: dict[str, Any] = {}
    whole = holds_whole(meta)
    for path, (start, stop) in meta["fragments"].items():
        holders = files.holders(path, start, stop)
        covered = sum(min(stop, high) - max(start, low) for low, high, _ in holders)
        if covered != stop - start:
            raise CheckpointError(
                f"{files.checkpoint}: {covered:,} of elements [{start}, {stop}) of {path} are in its records"
            )
        if not whole:
            holders = [*files.holders(path, 0, 1), *holders] if start else holders  # scalars stand with element 0
        tensors |= dict(_of_path(files, path, (start, stop), holders, whole))
        counts |= {entry["meta"]["step_count"] for _, _, entry in holders}
        for _, _, entry in holders:
            listed |= {path: entry["meta"]["state"][path]} if path in entry["meta"].get("state", {}) else {}
    if len(counts) > 1:
        raise CheckpointError(f"{files.checkpoint}: records of one group are of different steps: {sorted(counts)}")
    state = {"state": listed} if "state" in meta else {}
    return {**meta, "step_count": max(counts, default=0), **state}, tensors


def _of_path(
    files: _Files, path: str, extent: tuple[int, int], holders: list[tuple[int, int, dict[str, Any]]], whole: bool
) -> Iterator[tuple[str, Tensor]]:
    """ "<path>/<key>" and its elements of `extent`, or the scalar."""
    start, stop = extent
    parts: dict[str, list[Tensor]] = {}
    for low, high, entry in holders:
        for name, tensor in files.tensors(entry).items():
            if name.rpartition("/")[0] != path:
                continue
            if whole or tensor.dim() == 0:
                parts[name] = [tensor]
            elif max(start, low) < min(stop, high):
                parts.setdefault(name, []).append(tensor[max(start, low) - low : min(stop, high) - low])
    for name, held in parts.items():
        yield name, held[0] if len(held) == 1 else torch.cat(held)


def _state(checkpoint: Path, manifest: Mapping[str, Any], rank: int) -> dict[str, Tensor]:
    """Buffers of the rank that has its place modulo the saved world; random streams begin anew."""
    source = rank % manifest["topology"]["world_size"]
    entry = next(one for one in manifest["files"] if one["role"] == "state" and one["rank"] == source)
    tensors = read_verified(checkpoint, entry)[1]
    return {name: tensor for name, tensor in tensors.items() if name.startswith("buffer/")}
