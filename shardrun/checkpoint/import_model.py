"""A plain model of somebody else as one safetensors file to start from, without torch and without pickle."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shardrun.checkpoint.export import INDEX_FILE
from shardrun.checkpoint.manifest import MANIFEST, is_plain_name
from shardrun.checkpoint.store import MODEL_FILE, require_outside
from shardrun.errors import CheckpointError, UsageError
from shardrun.records.durable import remove_file, rename_new, sync_folder
from shardrun.records.header import TensorBytes, regular_file, stored_tensors, write_safetensors

_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Imported:
    """A durable file in `path`."""

    path: Path
    tensors: int
    bytes: int


def import_model(source: Path, target: Path) -> Imported:
    """Put the tensors of `source` into the new file `target`, for `init_from`; names, shapes and dtypes stay.

    `source` is a .safetensors file, or a folder that holds model.safetensors, or that file in several parts with an
    index, as transformers saves it. Links are followed. Needs the memory of one tensor. CheckpointError if the source
    is damaged, not whole, or holds pickle; UsageError if `target` is there already.
    """
    if target.suffix != ".safetensors":
        raise UsageError(f"{target}: init_from takes .safetensors files; give the new file such a name")
    require_outside(target)
    if os.path.lexists(target):
        raise UsageError(f"{target}: is there already and is left as it is; give a name that is not taken")
    with contextlib.ExitStack() as opened:
        tensors: dict[str, TensorBytes] = {}
        for path in _files(source):
            file = opened.enter_context(_open(path))
            held = stored_tensors(file, str(path))
            if twice := sorted(held.keys() & tensors.keys()):
                raise CheckpointError(f"{path}: holds {twice[0]}, which another file of {source} holds too")
            tensors |= held
        _check_index(source, tensors)
        return Imported(target, len(tensors), _write(target, tensors))


def _write(target: Path, tensors: Mapping[str, TensorBytes]) -> int:
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        written = write_safetensors(part, tensors, {"format": "pt"})
        rename_new(part, target)
        sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            remove_file(part)
    return written.bytes


# ---- what there is to read -------------------------------------------------------------------------------------------


def _files(source: Path) -> list[Path]:
    """The safetensors files that make the model; CheckpointError with the way out where it is something else."""
    if source.is_file() and source.suffix == ".safetensors":
        return [source]
    if (source / MANIFEST).is_file():
        raise CheckpointError(f"{source}: is a checkpoint of shardrun; use `shardrun export`, which checks its hashes")
    if (source / MODEL_FILE).is_file():
        return [source / MODEL_FILE]
    if (source / INDEX_FILE).is_file():
        return [source / name for name in sorted(set(_weight_map(source).values()))]
    if (source / ".metadata").is_file():
        raise CheckpointError(
            f"{source}: is a torch DCP checkpoint, whose .metadata is pickle, which is never read here; turn it into a "
            "state dict with dcp_to_torch_save (torch.distributed.checkpoint.format_utils), and save its model with "
            "safetensors"
        )
    raise CheckpointError(
        f"{source}: is neither a .safetensors file nor a folder with {MODEL_FILE} or {INDEX_FILE}; pickle (.pt, .bin) "
        "is never read here: load it with torch.load(..., weights_only=True), and save it with safetensors"
    )


def _open(path: Path) -> BinaryIO:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
    return regular_file(descriptor, str(path))


def _weight_map(source: Path) -> dict[str, str]:
    """Name -> file, as the index says; names of files in the folder itself only."""
    with _open(source / INDEX_FILE) as file:
        raw = file.read(_MOST_BYTES + 1)
    try:
        found = json.loads(raw)["weight_map"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{source / INDEX_FILE}: is no index of a model: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) and is_plain_name(name) for name in found.values()):
        raise CheckpointError(f"{source / INDEX_FILE}: weight_map does not give the name of a file for every tensor")
    return found


def _check_index(source: Path, tensors: Mapping[str, TensorBytes]) -> None:
    if source.is_file() or (source / MODEL_FILE).is_file():
        return
    if unlike := sorted(_weight_map(source).keys() ^ tensors.keys()):
        raise CheckpointError(
            f"{source}: {unlike[0]} ({len(unlike)} in all) is in the index and not in its files, or the other way round"
        )
