"""Steps 5 and 6 of a save, on rank 0 alone: manifest, the rename that is the commit, LATEST, retention."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrun.checkpoint.manifest import MANIFEST, canonical_json, parse_manifest, seal, sha256
from shardrun.checkpoint.retention import Retention, discard, retire
from shardrun.checkpoint.staging import NONCE, cannot_save, require_ownership
from shardrun.checkpoint.store import LATEST, scan, step_name
from shardrun.errors import CheckpointError
from shardrun.records.durable import (
    RenameUnsupported,
    exchange,
    remove_file,
    rename_new,
    replace_file,
    sync_folder,
    write_file,
)


@dataclass(frozen=True)
class Order:
    """What rank 0 is asked to publish: `staging`, with `entries` in it, under `run_dir`."""

    run_dir: Path
    staging: Path
    sections: dict[str, Any]
    entries: list[dict[str, Any]]
    needed: int
    retention: Retention
    fence: int | None

    @property
    def folder(self) -> Path:
        """The folder of checkpoints."""
        return self.staging.parent.parent

    @property
    def target(self) -> Path:
        """The name under which the checkpoint will be found."""
        return self.folder / step_name(self.sections["step"])


def publish(order: Order) -> dict[str, Any]:
    """Make staging the newest checkpoint; {"bytes": all files, "free": in the folder, "notes": on what came after}."""
    try:
        manifest = _write_manifest(order)
        free = shutil.disk_usage(order.folder).free
        require_ownership(order.run_dir, order.fence)
        _commit(order)
    except OSError as error:
        raise CheckpointError(cannot_save(order.folder, order.needed, error)) from error
    size = sum(entry["bytes"] for entry in order.entries) + len(manifest)
    return {"bytes": size, "free": free, "notes": _follow_up(order, sha256(manifest))}


def _write_manifest(order: Order) -> bytes:
    for entry in order.entries:
        found = os.stat(order.staging / entry["path"], follow_symlinks=False).st_size
        if found != entry["bytes"]:
            raise CheckpointError(
                f"{order.staging / entry['path']}: rank {entry['rank']} wrote {entry['bytes']:,} bytes, "
                f"rank 0 finds {found:,}; the run folder has to be one folder that all ranks share"
            )
    remove_file(order.staging / NONCE)
    sequence = 1 + max((found.sequence or 0 for found in scan(order.run_dir)), default=0)
    files = sorted(order.entries, key=lambda entry: str(entry["path"]))
    manifest = seal({**order.sections, "sequence": sequence, "saved_at": int(time.time()), "files": files})
    parse_manifest(manifest)  # what could not be read back is not published
    write_file(order.staging / MANIFEST, manifest)
    sync_folder(order.staging)
    return manifest


def _commit(order: Order) -> None:
    try:
        rename_new(order.staging, order.target)
    except FileExistsError:
        _replace(order)
    try:
        sync_folder(order.folder)
    except OSError as error:
        raise CheckpointError(
            f"{order.target}: is published, but whether it would survive a power cut is not known: {error.strerror}"
        ) from error


def _replace(order: Order) -> None:
    """Another checkpoint of this step is there, of an earlier line of this run; at every moment one of them is."""
    try:
        exchange(order.staging, order.target)
    except RenameUnsupported:
        # Killed between these two, the run goes on from the checkpoint before; no worse than before this save.
        discard(order.folder, order.target)
        rename_new(order.staging, order.target)


def _follow_up(order: Order, manifest_sha256: str) -> list[str]:
    """LATEST, then retention. The checkpoint is durable by now, so that trouble here is told and no error."""
    hint = {"step": order.sections["step"], "dir": order.target.name, "manifest_sha256": manifest_sha256}
    try:
        replace_file(order.folder / LATEST, canonical_json(hint) + b"\n")
        if order.staging.is_dir():  # what `exchange` put there
            discard(order.folder, order.staging)
        retire(order.run_dir, order.retention)
    except OSError as error:
        return [f"{order.target}: is saved; afterwards {error.filename or order.folder}: {error.strerror}"]
    return []
