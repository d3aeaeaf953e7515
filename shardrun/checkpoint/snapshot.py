"""What a rank hands over to be saved, and the files that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from shardrun.checkpoint.files import MODEL_METADATA, file_metadata, kept_on_disk
from shardrun.checkpoint.manifest import canonical_json, is_plain_name
from shardrun.checkpoint.plan import PARAM_SHA256, Plan, PlannedFile
from shardrun.checkpoint.store import model_file, record_file, state_file
from shardrun.errors import CheckpointError
from shardrun.records.fit import holds_whole, piece_violations
from shardrun.records.header import TensorBytes
from shardrun.records.header_parser import DTYPE_NAMES
from shardrun.records.record import ShardRecord, record_key
from shardrun.records.tensors import form_bytes, host_bytes, tensor_bytes
from shardrun.shard.contract import Contract

# What of a record's meta describes its group; it stands once in the manifest. The rest stands beside each file.
GROUP_SECTIONS = ("contract", "layout", "optimizer", "numerics")


@dataclass(frozen=True)
class ModelParts:
    """Who writes what of a model that several ranks write; the same on all ranks, but for `own`.

    `specs`: {name: [dtype, shape]} of the whole model, tied tensors once. `aliases`: of the whole model. `writers`:
    ranks that write a file of it. `own`: names that this rank writes. `replicated`: every rank has all of it, and
    writes a share; in the manifest the files are of rank 0 then, as a single one is.
    """

    specs: Mapping[str, list[Any]]
    aliases: Mapping[str, str]
    writers: Sequence[int]
    own: Collection[str]
    replicated: bool = False


@dataclass(frozen=True)
class Snapshot:
    """The state of one rank at a step.

    `manifest`: the plain-JSON sections of the manifest, the same on every rank: run, attempt, parent, counters,
    topology, schedule, data, numerics, config, meaning, param_sha256, groups (a group's contract, layout, optimizer
    and numerics are taken from its record where they are not given). The field `param_sha256` may stand in for the
    section of that name where the ranks have compared their parameters already: it is given what a rank writes of the
    model, while that is written.
    `model`: the whole model by name, tied tensors once; rank 0 writes it, all ranks describe it. With `parts` it is
    what this rank has of it. `aliases`: further names of tied tensors -> the name in `model`. `records`: group -> this
    rank's record. `rank_state`: this rank's own tensors (RNG streams as uint8, rank-local buffers, ...). Tensors are
    read while `save` runs, never written.
    """

    step: int
    manifest: Mapping[str, Any]
    model: Mapping[str, Tensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    records: Mapping[str, ShardRecord] = field(default_factory=dict)
    rank_state: Mapping[str, Tensor] = field(default_factory=dict)
    param_sha256: Callable[[Mapping[str, Tensor]], str] | None = None
    parts: ModelParts | None = None

    def written(self, rank: int) -> dict[str, Tensor]:
        """What of the model `rank` writes."""
        if self.parts is None:
            return dict(self.model) if rank == 0 else {}
        return {name: self.model[name] for name in sorted(self.parts.own)}


def plan_of(snapshot: Snapshot, rank: int, world_size: int) -> Plan:
    """What `rank` does to save its snapshot. CheckpointError if that cannot be."""
    if PARAM_SHA256 not in snapshot.manifest and snapshot.param_sha256 is None:
        raise CheckpointError(f"{PARAM_SHA256} is missing: every rank has to bring the digest of its parameters")
    sections = {
        **snapshot.manifest,
        "step": snapshot.step,
        "topology": {**snapshot.manifest.get("topology", {}), "world_size": world_size},
        "groups": group_sections(snapshot),
        "model": model_specs(snapshot.model) if snapshot.parts is None else dict(snapshot.parts.specs),
        "aliases": dict(snapshot.aliases if snapshot.parts is None else snapshot.parts.aliases),
    }
    files = planned_files(snapshot, rank, world_size)
    split = {group: split_state(record) for group, record in snapshot.records.items()}
    hashes = None
    written = snapshot.written(rank)
    if written and snapshot.param_sha256 is not None:
        hashes = partial(snapshot.param_sha256, written)
    first = [] if rank == 0 else [name for name, record in snapshot.records.items() if record.meta["rank"] == 0]
    needed = sum(file.nbytes for file in files)
    return Plan(snapshot.step, files, sections, needed, split, hashes, {n: sections["groups"][n] for n in first})


def model_specs(model: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """{name: [dtype, shape]} of a model, as in the manifest and in what `load` expects."""
    described = {name: form_bytes(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in model.items()}
    return {name: [DTYPE_NAMES[one.dtype], list(one.shape)] for name, one in described.items()}


def group_sections(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """The groups as the manifest has them; CheckpointError where a record contradicts what the manifest was given."""
    groups: dict[str, dict[str, Any]] = {
        name: dict(given) for name, given in snapshot.manifest.get("groups", {}).items()
    }
    for name, record in snapshot.records.items():
        section = groups.setdefault(name, {})
        for key in GROUP_SECTIONS:
            if key not in record.meta:
                continue
            if canonical_json(section.setdefault(key, record.meta[key])) != canonical_json(record.meta[key]):
                raise CheckpointError(f"group {name}: {key} of its record is not the {key} in the manifest")
    return groups


def planned_files(snapshot: Snapshot, rank: int, world_size: int) -> list[PlannedFile]:
    """The files of this rank: its records, its state, and what it writes of the model. CheckpointError if one cannot
    be."""
    files = []
    if written := snapshot.written(rank):
        tied = [
            alias for alias, name in snapshot.aliases.items() if name not in snapshot.model or alias in snapshot.model
        ]
        if tied:
            raise CheckpointError(f"aliases {tied} do not point from a name that is not stored to one that is")
        writers = [0] if snapshot.parts is None else list(snapshot.parts.writers)
        path = model_file(writers.index(rank), len(writers))
        owner = rank if snapshot.parts is not None and not snapshot.parts.replicated else 0
        files.append(_planned(snapshot, path, written, MODEL_METADATA, {"role": "model", "rank": owner}))
    for group, record in snapshot.records.items():
        files.append(_planned_record(snapshot, group, record, rank))
    entry = {"role": "state", "rank": rank}
    files.append(_planned(snapshot, state_file(rank, world_size), snapshot.rank_state, {}, entry))
    return files


def _planned_record(snapshot: Snapshot, group: str, record: ShardRecord, rank: int) -> PlannedFile:
    if not is_plain_name(group):
        raise CheckpointError(f"group {group!r} cannot be a folder name; use letters, digits and . _ -")
    fragments: dict[str, list[int]] = {path: list(held) for path, held in record.meta["fragments"].items()}
    whole = holds_whole(record.meta)
    misfits = piece_violations(fragments, _shaped(record.tensors), whole=whole)
    if misfits:
        raise CheckpointError(f"record of group {group} is not whole: " + "; ".join(misfits))
    kept = kept_on_disk(record.tensors, {name: t.dim() for name, t in record.tensors.items()}, fragments)
    own = {key: value for key, value in record.meta.items() if key not in (*GROUP_SECTIONS, "group", "fragments")}
    entry = {"role": "record", "rank": rank, "group": group, "fragments": fragments, "meta": own}
    path = record_file(group, record.meta["rank"], record.meta["world_size"], "zero1" if whole else "zero2")
    contract = Contract.from_json(record.meta["contract"])
    return _planned(snapshot, path, kept, {"contract": contract.digest}, entry)


def _shaped(tensors: Mapping[str, Tensor]) -> dict[str, TensorBytes]:
    return {name: tensor_bytes(name, tensor) for name, tensor in tensors.items()}


def _planned(
    snapshot: Snapshot, path: str, tensors: Mapping[str, Tensor], metadata: dict[str, str], entry: dict[str, Any]
) -> PlannedFile:
    told = file_metadata(snapshot.step, snapshot.manifest.get("run"), metadata)
    return PlannedFile(path, _shaped(tensors), told, entry)


def split_state(record: ShardRecord) -> dict[str, dict[str, str]]:
    """What all holders of a cut parameter must hold alike: {path: {key: dtype, and value if it is a scalar}}."""
    whole = {spec.path: [0, spec.numel] for spec in Contract.from_json(record.meta["contract"]).specs}
    found: dict[str, dict[str, str]] = {
        path: {} for path, held in record.meta["fragments"].items() if list(held) != whole.get(path)
    }
    for name, tensor in record.tensors.items():
        path, key = record_key(name)
        if path in found:
            value = "" if tensor.dim() else " " + bytes(host_bytes(tensor)).hex()
            found[path][key] = str(tensor.dtype) + value
    return found
