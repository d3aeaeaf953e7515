"""One rank's files of a checkpoint, hashed while they are read into fresh tensors. Files are read, never mapped: a file
that shrinks under a mapping would kill the process."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from shardrun.checkpoint.safe_files import open_inside
from shardrun.checkpoint.snapshot import GROUP_SECTIONS
from shardrun.errors import CheckpointError
from shardrun.records.fit import holds_whole, piece_violations
from shardrun.records.hashes import FileHash, changed
from shardrun.records.header import Header, fill, read_header_of
from shardrun.records.header_parser import DTYPE_NAMES
from shardrun.records.new_file import CHUNK
from shardrun.records.record import ShardRecord, record_key, record_of
from shardrun.records.tensors import as_bytes, fresh_tensor, host_bytes, scalar_tensor
from shardrun.shard.contract import Contract

Digests = Callable[[Mapping[str, Tensor]], Mapping[str, str]]
"""Of tensors by name, a digest each."""


@dataclass
class RankFiles:
    """What a rank has read; `problems` names every file that is not what the manifest says."""

    model: dict[str, Tensor] = field(default_factory=dict)
    model_files: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Path -> names in it, of the files of the model that were read whole."""
    digests: dict[str, Mapping[str, str]] = field(default_factory=dict)
    """Path -> the digests of what is in it, if they were asked for."""
    records: dict[str, ShardRecord] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_rank_files(
    checkpoint: Path,
    manifest: Mapping[str, Any],
    rank: int,
    names: Collection[str] | None = None,
    digests: Digests | None = None,
) -> RankFiles:
    """The model, and `rank`'s records and state. A problem with one file keeps no other from being checked.

    `names`: read only those files of the model that have one of them; its other files are looked at, not read.
    `digests` is called with what a file of the model holds, while others are still being read.
    """
    found = RankFiles()
    # Side by side: reading waits for the disk while another file is hashed.
    with ThreadPoolExecutor() as readers:
        reading = [readers.submit(read_model, found, checkpoint, manifest, names, digests)]
        for label, entries in _files_due(manifest, rank).items():
            reading.append(readers.submit(_read_only, found, checkpoint, manifest, label, entries))
    for one in reading:
        try:
            one.result()
        except CheckpointError as error:
            found.problems.append(str(error))
    if not found.problems:
        aliases = manifest["aliases"].items()
        found.model |= {alias: found.model[name] for alias, name in aliases if name in found.model}
    return found


def read_model(
    found: RankFiles,
    checkpoint: Path,
    manifest: Mapping[str, Any],
    names: Collection[str] | None,
    digests: Digests | None = None,
) -> None:
    """The files of the model, which have to make up what the manifest lists, each tensor once."""
    listed: dict[str, list[Any]] = {}
    for entry in (entry for entry in manifest["files"] if entry["role"] == "model"):
        try:
            with open_inside(checkpoint, entry["path"]) as file:
                header, _ = read_header_of(file, str(checkpoint / entry["path"]))
            held = {name: [DTYPE_NAMES[one.dtype], list(one.shape)] for name, one in header.tensors.items()}
            if any(manifest["model"].get(name) != spec for name, spec in held.items()) or listed.keys() & held.keys():
                raise CheckpointError(
                    f"{checkpoint / entry['path']}: its tensors are not those that the manifest lists"
                )
            listed |= held
            if names is None or not held.keys().isdisjoint(names):
                read = read_verified(checkpoint, entry)[1]
                found.model |= read
                found.model_files[entry["path"]] = tuple(held)
                if digests is not None:
                    found.digests[entry["path"]] = digests(read)
        except CheckpointError as error:
            found.problems.append(str(error))
            listed |= manifest["model"]  # said already
    if missing := sorted(manifest["model"].keys() - listed.keys()):
        found.problems.append(f"{checkpoint}: no file of the model has {missing[0]} ({len(missing)} in all)")


def _files_due(manifest: Mapping[str, Any], rank: int) -> dict[str, list[dict[str, Any]]]:
    """What a rank has to find -> the entries that claim to be it; sound is exactly one each."""
    mine = [entry for entry in manifest["files"] if entry["rank"] == rank]
    due: dict[str, list[dict[str, Any]]] = {}
    for name, group in manifest["groups"].items():
        if rank in group.get("members", [rank]):
            due[f"the record of group {name} of rank {rank}"] = [
                entry for entry in mine if entry["role"] == "record" and entry["group"] == name
            ]
    due[f"the state of rank {rank}"] = [entry for entry in mine if entry["role"] == "state"]
    return due


def _read_only(
    found: RankFiles, checkpoint: Path, manifest: Mapping[str, Any], label: str, entries: list[dict[str, Any]]
) -> None:
    if len(entries) != 1:
        raise CheckpointError(f"{checkpoint}: the manifest lists {len(entries)} files for {label}, not one")
    _read_into(found, checkpoint, manifest, entries[0])


def _read_into(found: RankFiles, checkpoint: Path, manifest: Mapping[str, Any], entry: Mapping[str, Any]) -> None:
    header, tensors = read_verified(checkpoint, entry)
    where = checkpoint / entry["path"]
    if entry["role"] == "record":
        group = manifest["groups"][entry["group"]]
        misfits = piece_violations(entry["fragments"], header.tensors, whole=holds_whole(group))
        if misfits:
            raise CheckpointError(f"{where}: {'; '.join(misfits[:5])}")
        sections = {key: group[key] for key in GROUP_SECTIONS if key in group}
        meta = {**entry["meta"], **sections, "group": entry["group"], "fragments": entry["fragments"]}
        found.records[entry["group"]] = record_of(meta, tensors)
    else:
        found.state = tensors


def read_verified(checkpoint: Path, entry: Mapping[str, Any]) -> tuple[Header, dict[str, Tensor]]:
    """Header and tensors of one registered file; CheckpointError unless size, form and hash are as registered."""
    where = str(checkpoint / entry["path"])
    with open_inside(checkpoint, entry["path"]) as file:
        size = os.fstat(file.fileno()).st_size
        if size != entry["bytes"]:
            raise CheckpointError(f"{where}: {entry['bytes']:,} bytes expected, {size:,} found")
        header, head = read_header_of(file, where)
        digest = FileHash.like(entry["hash"])
        digest.update(head)
        tensors = {}
        # In the order of the file, which has no gaps: every byte goes through the hash once.
        for name, one in header.tensors.items():
            tensors[name] = fresh_tensor(one)
            rest = as_bytes(tensors[name])
            while rest.nbytes:
                chunk, rest = rest[:CHUNK], rest[CHUNK:]
                fill(file, chunk, where)
                digest.update(chunk)
    if digest.text != entry["hash"]:
        raise CheckpointError(f"{where}: {changed(entry['hash'], digest.text)}")
    return header, tensors


# ---- scalars of parameters that are cut ------------------------------------------------------------------------------


def shared_scalars(records: Mapping[str, ShardRecord]) -> dict[str, dict[str, list[str]]]:
    """{group: {name: [dtype, bytes as hex]}} of the scalars that this rank's file holds for other ranks too."""
    shared: dict[str, dict[str, list[str]]] = {}
    for group, record in records.items():
        numel = {spec.path: spec.numel for spec in Contract.from_json(record.meta["contract"]).specs}
        for name, tensor in record.tensors.items():
            path = record_key(name)[0]
            if tensor.dim() == 0 and record.meta["fragments"][path][1] < numel.get(path, 0):
                text = [str(tensor.dtype).removeprefix("torch."), bytes(host_bytes(tensor)).hex()]
                shared.setdefault(group, {})[name] = text
    return shared


def spread_scalars(records: Mapping[str, ShardRecord], shared: Iterable[Mapping[str, Mapping[str, list[str]]]]) -> None:
    """Give each record the scalars of the fragments that begin on another rank; `shared` comes from all ranks."""
    for groups in shared:
        for group, scalars in groups.items():
            for name, (dtype, data) in scalars.items():
                held = records[group].meta["fragments"].get(record_key(name)[0]) if group in records else None
                if held is not None and held[0] > 0:
                    records[group].tensors[name] = scalar_tensor(dtype, bytes.fromhex(data))
