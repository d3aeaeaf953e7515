"""The files of a checkpoint that depend on the world size, copied range by range into those of another one.

Tensors stand in one order (widest dtype first, then by name) in the files of both worlds. So going through the names
in that order reads every source once, from its beginning to its end, and writes every target so, and both are hashed
while the bytes pass.
"""

from __future__ import annotations

import contextlib
import hashlib
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrun.checkpoint.assemble import Piece, chunks, open_header
from shardrun.checkpoint.byte_copies import Copier
from shardrun.checkpoint.store import record_file, state_file
from shardrun.errors import CheckpointError
from shardrun.records.fit import holds_whole, piece_violations
from shardrun.records.header import Entry, Header, TensorBytes, encode_header
from shardrun.records.header_parser import DTYPE_BYTES
from shardrun.records.new_file import CHUNK, FileDigest
from shardrun.records.reshard import Copy, Cut, Fragments, copies, cut_again

_BUFFER, _STREAM = "buffer/", "rng/"
_WIDEST_FIRST = {dtype: place for place, dtype in enumerate(DTYPE_BYTES)}


@dataclass(frozen=True)
class _Move:
    """The bytes [start, stop) of the file of rank `source`, which come next in the file of rank `target`."""

    source: int
    target: int
    start: int
    stop: int


def copy_records(
    copier: Copier, manifest: Mapping[str, Any], group: str, world_size: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The records of a group of the whole world, cut for `world_size` ranks, as files.

    What changes in the group's section of the manifest, and the entries of the files. CheckpointError if the records
    are damaged or not whole.
    """
    section = manifest["groups"][group]
    old = _by_rank(copier.checkpoint, manifest, "record", group)
    held = [entry["fragments"] for entry in old]
    cut = cut_again(section, held, [entry["meta"] for entry in old], world_size)
    whole = holds_whole(section)
    paths = [record_file(group, rank, world_size, "zero1" if whole else "zero2") for rank in range(world_size)]
    with _room_for(len(old) + world_size), contextlib.ExitStack() as opened:
        sources = [opened.enter_context(copier.source(entry)) for entry in old]
        headers = [source.header for source in sources]
        for entry, header in zip(old, headers, strict=True):
            if found := piece_violations(entry["fragments"], header.tensors, whole=whole):
                raise CheckpointError(f"{copier.checkpoint / entry['path']}: {'; '.join(found[:5])}")
        tensors, moves = _plan(headers, held, cut, whole)
        heads = [encode_header(own, headers[0].metadata)[0] for own in tensors]
        targets = [opened.enter_context(copier.target(path, head)) for path, head in zip(paths, heads, strict=True)]
        for move in moves:
            sources[move.source].copy(move.start, move.stop, targets[move.target])
        for source in sources:
            source.finish()
        written = [target.finish() for target in targets]
    entries = [
        {**_entry("record", rank, paths[rank], written[rank]), "group": group, "fragments": held, "meta": meta}
        for rank, (held, meta) in enumerate(zip(cut.fragments, cut.metas, strict=True))
    ]
    return cut.section, entries


@contextlib.contextmanager
def _room_for(files: int) -> Iterator[None]:
    """So many files more may be open in this process, as far as the system lets it ask for that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft + files, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _by_rank(
    checkpoint: Path, manifest: Mapping[str, Any], role: str, group: str | None = None
) -> list[dict[str, Any]]:
    """The one entry of each rank."""
    found = [entry for entry in manifest["files"] if entry["role"] == role and entry.get("group") == group]
    found.sort(key=lambda entry: int(entry["rank"]))
    ranks = [entry["rank"] for entry in found]
    if len(ranks) != manifest["topology"]["world_size"] or ranks != list(range(len(ranks))):
        raise CheckpointError(
            f"{checkpoint}: the manifest lists a {role} of each of ranks {ranks}, not one of every rank"
        )
    return found


def _entry(role: str, rank: int, path: str, written: FileDigest) -> dict[str, Any]:
    return {"role": role, "rank": rank, "path": path, "bytes": written.bytes, "hash": written.hash}


def _plan(
    headers: Sequence[Header], held: Sequence[Fragments], cut: Cut, whole: bool
) -> tuple[list[dict[str, TensorBytes]], list[_Move]]:
    """The tensors of each target, and all moves in the order of the files."""
    tensors: list[dict[str, TensorBytes]] = [{} for _ in cut.fragments]
    moves: list[_Move] = []
    by_path = copies(held, cut.fragments)
    for name in _in_file_order(headers):
        entries = {rank: header.tensors[name] for rank, header in enumerate(headers) if name in header.tensors}
        parts = by_path[name.rpartition("/")[0]]
        if whole or any(entry.shape == () for entry in entries.values()):
            # In one piece: a tensor of an owner, or a scalar, which stands with the first element of its parameter.
            _require_holders(name, entries, {parts[0].source})
            entry, target = entries[parts[0].source], parts[0].target
            tensors[target][name] = TensorBytes(entry.dtype, entry.shape, _by_ranges)
            moves.append(_Move(parts[0].source, target, entry.start, entry.stop))
            continue
        _require_holders(name, entries, {part.source for part in parts})
        for part in parts:
            moves.append(_move(name, part, entries[part.source], held[part.source]))
            low, high = cut.fragments[part.target][name.rpartition("/")[0]]
            tensors[part.target][name] = TensorBytes(entries[part.source].dtype, (high - low,), _by_ranges)
    return tensors, moves


def _in_file_order(headers: Sequence[Header]) -> list[str]:
    dtypes: dict[str, str] = {}
    for rank, header in enumerate(headers):
        for name, entry in header.tensors.items():
            if dtypes.setdefault(name, entry.dtype) != entry.dtype:
                raise CheckpointError(f"state {name}: rank {rank} has dtype {entry.dtype}, another one {dtypes[name]}")
    return sorted(dtypes, key=lambda name: (_WIDEST_FIRST[dtypes[name]], name))


def _require_holders(name: str, entries: Mapping[int, Entry], wanted: set[int]) -> None:
    if entries.keys() != wanted:
        raise CheckpointError(f"state {name}: held by ranks {sorted(entries)}, expected {sorted(wanted)}")


def _move(name: str, part: Copy, entry: Entry, held: Fragments) -> _Move:
    begin, itemsize = held[name.rpartition("/")[0]][0], DTYPE_BYTES[entry.dtype]
    start, stop = (entry.start + (element - begin) * itemsize for element in (part.start, part.stop))
    return _Move(part.source, part.target, start, stop)


def _by_ranges() -> bytes:
    raise AssertionError("these bytes are copied, not written as a tensor")


# ---- the ranks' own state --------------------------------------------------------------------------------------------


def copy_states(copier: Copier, manifest: Mapping[str, Any], world_size: int) -> tuple[list[dict[str, Any]], list[str]]:
    """The own state of every new rank, as files: buffers, those of rank r modulo the old world size.

    The entries of the files, and notes for the user. CheckpointError if a state is damaged, or has more than random
    streams and buffers.
    """
    checkpoint, old = copier.checkpoint, _by_rank(copier.checkpoint, manifest, "state")
    headers = [open_header(checkpoint, entry["path"]) for entry in old]
    for entry, header in zip(old, headers, strict=True):
        if foreign := sorted(name for name in header.tensors if not name.startswith((_BUFFER, _STREAM))):
            raise CheckpointError(
                f"{checkpoint / entry['path']}: holds {foreign[0]} ({len(foreign)} in all), such as of a half-filled "
                f"window, which belongs to {len(old)} ranks; go on at that world size and save after an update"
            )
    entries = []
    for rank in range(world_size):
        path = state_file(rank, world_size)
        entries.append(_entry("state", rank, path, _copy_buffers(copier, path, old[rank % len(old)])))
    for entry in old[world_size:]:
        copier.check_file(entry)
    return entries, _notes(checkpoint, old, headers)


def _copy_buffers(copier: Copier, path: str, entry: Mapping[str, Any]) -> FileDigest:
    with copier.source(entry) as source:
        buffers = {name: one for name, one in source.header.tensors.items() if name.startswith(_BUFFER)}
        described = {name: TensorBytes(one.dtype, one.shape, _by_ranges) for name, one in buffers.items()}
        head, order = encode_header(described, source.header.metadata)
        with copier.target(path, head) as target:
            for name in order:
                source.copy(buffers[name].start, buffers[name].stop, target)
            source.finish()
            return target.finish()


def _notes(checkpoint: Path, old: Sequence[Mapping[str, Any]], headers: Sequence[Header]) -> list[str]:
    """Where ranks have buffers of their own, as those of norms are, a new world cannot have all of them."""
    hashes: dict[str, set[str]] = {}
    for entry, header in zip(old, headers, strict=True):
        for name, one in header.tensors.items():
            if name.startswith(_BUFFER):
                digest = hashlib.sha256()
                for chunk in chunks(checkpoint, [Piece(0, 0, 0, entry["path"], one)], CHUNK):
                    digest.update(chunk)
                hashes.setdefault(name.removeprefix(_BUFFER), set()).add(digest.hexdigest())
    differing = sorted(name for name, found in hashes.items() if len(found) > 1)
    if not differing:
        return []
    told = f"{len(differing)} buffers, {differing[0]} among them, are not the same on all {len(old)} ranks"
    return [f"{told}: rank r gets those of rank r modulo {len(old)}"]
