"""A checkpoint taken up by other replica sets than those that saved it: every rank picks what it holds now.

Records are known by path and element range, so that a rank finds the state of its parameters in whichever files have
them. Nothing is written; see `reshard` for a checkpoint of the whole world, which is cut again as files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
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
from shardrun.records.fit import differences, holds_whole, shared_differences
from shardrun.records.record import record_key, record_of


@dataclass(frozen=True)
class Held:
    """What a rank has of the model: names of its tensors, further names of tied ones -> the first, and its buffers."""

    names: Collection[str]
    aliases: Mapping[str, str]
    buffers: Collection[str]
    """As the rank's state names them."""


@dataclass
class _Files:
    """The record files of a checkpoint, each read and hashed once."""

    checkpoint: Path
    manifest: Mapping[str, Any]
    _read: dict[str, dict[str, dict[str, Tensor]]] = field(default_factory=dict)
    """File -> parameter -> name -> tensor."""

    def holders(self, path: str, start: int, stop: int) -> list[tuple[int, int, dict[str, Any]]]:
        """(start, stop, entry) of the files that have elements of [start, stop) of a parameter, in their order."""
        found = []
        for entry in self.manifest["files"]:
            held = entry.get("fragments", {}).get(path) if entry["role"] == "record" else None
            if held is not None and max(start, held[0]) < min(stop, held[1]):
                found.append((held[0], held[1], entry))
        return sorted(found, key=lambda one: one[:2])

    def of_path(self, entry: Mapping[str, Any], path: str) -> Mapping[str, Tensor]:
        """What a file has of a parameter, by name; CheckpointError unless the file is as registered."""
        if entry["path"] not in self._read:
            by_path = self._read[entry["path"]] = {}
            for name, tensor in read_verified(self.checkpoint, entry)[1].items():
                by_path.setdefault(record_key(name)[0], {})[name] = tensor
        return self._read[entry["path"]].get(path, {})

    def step_count(self, paths: Collection[str]) -> int:
        """Steps of the groups that have any of these parameters; of several the most: a part of a model that no token
        reached has stood still, and the ranks that hold it from here on count together."""
        records = [entry for entry in self.manifest["files"] if entry["role"] == "record"]
        return max((e["meta"]["step_count"] for e in records if not e["fragments"].keys().isdisjoint(paths)), default=0)


def load_regrouped(
    checkpoint: Path,
    comm: Communicator,
    metas: Mapping[str, Mapping[str, Any]],
    held: Held,
    numerics: Mapping[str, Any],
) -> Loaded:
    """What this rank needs of a checkpoint: what it has of the model, and records for its sessions.

    `metas`: their `record_meta()`, by the names of their records; `numerics`: what has to be as it was saved. Every
    rank of the world calls it; nothing is changed. CheckpointError on all ranks if a file is damaged, if a parameter,
    an optimizer or a number does not fit, or if no rank has what the checkpoint holds.
    """
    loaded: list[Loaded] = []

    def look() -> dict[str, Any]:
        manifest, _ = read_manifest(checkpoint)
        model = RankFiles()
        read_model(model, checkpoint, manifest, held.names)
        model.model |= {alias: model.model[n] for alias, n in manifest["aliases"].items() if n in model.model}
        saved = {key: manifest.get("numerics", {}).get(key) for key in numerics}
        unlike = [f"{line} (--accept-changes)" for line in differences(saved, dict(numerics), "numerics")]
        found = [*model.problems, *_model_misfits(model.model, held), *unlike]
        files = _Files(checkpoint, manifest)
        records, sections = {}, {}
        for name, meta in metas.items():
            sections[name], problems = _section(manifest, name, meta)
            found += problems
            if not found:
                records[name] = record_of(*_collected(files, meta))
        state = _state(checkpoint, manifest, comm.rank, held.buffers) if not found else {}
        sealed = {**manifest, "groups": sections, RESHARDED: {"world_size": manifest["topology"]["world_size"]}}
        loaded.append(
            Loaded(manifest["step"], checkpoint, sealed, model.model, records, state, model_files=model.model_files)
        )
        return {"problems": found, "left": _left(manifest, held.names, metas.values())}

    votes = together(comm, "regroup", look)
    problems = [line for vote in votes for line in vote["problems"]]
    if problems := problems or sorted(set.intersection(*({*vote["left"]} for vote in votes))):
        told = "\n  ".join([f"checkpoint {checkpoint} does not fit this run:", *dict.fromkeys(problems)])
        raise CheckpointError(told)
    return loaded[0]


def _model_misfits(found: Mapping[str, Tensor], held: Held) -> list[str]:
    """What this rank has and the checkpoint has not, or has as several tensors."""
    missing = [f"model: {name} is not in the checkpoint" for name in sorted({*held.names} - {*found})]
    untied = [
        f"{alias}: saved as a tensor of its own, this run tied to {name}"
        for alias, name in sorted(held.aliases.items())
        if alias in found and name in found and found[alias] is not found[name]
    ]
    return missing + untied


def _left(manifest: Mapping[str, Any], names: Collection[str], metas: Iterable[Mapping[str, Any]]) -> list[str]:
    """What the checkpoint holds and this rank does not take up, a line each: lost, if no rank does."""
    trained = {spec["path"] for meta in metas for spec in meta["contract"]}
    saved = {spec["path"] for group in manifest["groups"].values() for spec in group["contract"]}
    return [
        *(
            f"model: {name} is in the checkpoint, no rank of this run has it"
            for name in {*manifest["model"]} - {*names}
        ),
        *(f"{path}: the checkpoint trains it, this run does not" for path in saved - trained),
    ]


def _section(manifest: Mapping[str, Any], name: str, meta: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A group's section as this world would have saved it, and what of it does not fit."""
    found: list[str] = []
    optimizers: list[dict[str, Any]] = []
    wanted = {spec["path"] for spec in meta["contract"]}
    for group in manifest["groups"].values():
        found += shared_differences(group["contract"], meta["contract"])
        if not wanted.isdisjoint(spec["path"] for spec in group["contract"]):
            optimizers.append({**group["optimizer"], **_owners(meta)})
    held = {spec["path"] for group in manifest["groups"].values() for spec in group["contract"]}
    found += [f"{path}: this run trains it, the checkpoint does not" for path in sorted(wanted - held)]
    for other in optimizers[1:]:
        found += [f"{name} of several groups: {line}" for line in differences(optimizers[0], other, "optimizer")]
    return {**{key: meta[key] for key in ("contract", "layout")}, "optimizer": (optimizers or [{}])[0]}, found


def _owners(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Those of this run, which a regrouped record is for."""
    return {"owners": meta["optimizer"]["owners"]} if "owners" in meta["optimizer"] else {}


def _collected(files: _Files, meta: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Meta and tensors of a record with the fragments of `meta`, out of those in the files."""
    tensors: dict[str, Tensor] = {}
    listed: dict[str, Any] = {}
    for path, (start, stop) in meta["fragments"].items():
        holders = files.holders(path, start, stop)
        covered = sum(min(stop, high) - max(start, low) for low, high, _ in holders)
        if covered != stop - start:
            raise CheckpointError(
                f"{files.checkpoint}: {covered:,} of elements [{start}, {stop}) of {path} are in its records"
            )
        tensors |= dict(_of_path(files, path, (start, stop), whole=holds_whole(meta)))
        for _, _, entry in holders:
            listed |= {path: entry["meta"]["state"][path]} if path in entry["meta"].get("state", {}) else {}
    state = {"state": listed} if "state" in meta else {}
    return {**meta, "step_count": files.step_count({spec["path"] for spec in meta["contract"]}), **state}, tensors


def _of_path(files: _Files, path: str, extent: tuple[int, int], *, whole: bool) -> Iterator[tuple[str, Tensor]]:
    """ "<path>/<key>" and its elements of `extent`, or all of it where it is `whole`; scalars stand with element 0."""
    start, stop = extent
    parts: dict[str, list[Tensor]] = {}
    for _, _, entry in files.holders(path, 0, 1):
        held = files.of_path(entry, path)
        parts |= {name: [tensor] for name, tensor in held.items() if whole or tensor.dim() == 0}
    for low, high, entry in () if whole else files.holders(path, start, stop):
        for name, tensor in files.of_path(entry, path).items():
            if tensor.dim():
                parts.setdefault(name, []).append(tensor[max(start, low) - low : min(stop, high) - low])
    for name, pieces in parts.items():
        yield name, pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _state(checkpoint: Path, manifest: Mapping[str, Any], rank: int, names: Collection[str]) -> dict[str, Tensor]:
    """Buffers `names`, of the rank that has this one's place modulo the saved world or, what that one has not, of the
    next one that has it; random streams begin anew."""
    world_size = manifest["topology"]["world_size"]
    entries = [entry for entry in manifest["files"] if entry["role"] == "state"]
    found: dict[str, Tensor] = {}
    for entry in sorted(entries, key=lambda entry: (entry["rank"] - rank) % world_size):
        if missing := {*names} - {*found}:
            held = read_verified(checkpoint, entry)[1]
            found |= {name: held[name] for name in missing & {*held}}
    return found
