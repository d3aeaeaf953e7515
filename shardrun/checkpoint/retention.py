"""What goes: left-overs of earlier saves, and old checkpoints once a newer one is published."""

from __future__ import annotations

import secrets
from pathlib import Path

from shardrun.checkpoint.store import CHECKPOINTS, LATEST, STAGING, TRASH, scan
from shardrun.errors import UsageError
from shardrun.records.durable import make_folder, remove_file, remove_tree, rename_new, sync_folder


def clear_leftovers(folder: Path) -> None:
    """Remove what killed saves left in a folder of checkpoints. Only the owner of the run folder may; OSError."""
    for name in (STAGING, TRASH):
        if (folder / name).is_symlink():
            remove_file(folder / name)
        elif (folder / name).is_dir():
            for left in sorted((folder / name).iterdir()):
                remove_tree(left)
    for left in sorted(folder.glob(f".{LATEST}.*")):
        remove_file(left)


def discard(folder: Path, path: Path) -> None:
    """Take a checkpoint out of sight by one rename, then remove it. Killed in between, the rest is a left-over."""
    make_folder(folder / TRASH, exist_ok=True)
    out_of_sight = folder / TRASH / f"{path.name}.{secrets.token_hex(4)}"
    rename_new(path, out_of_sight)
    sync_folder(folder)
    remove_tree(out_of_sight)


def retire(run_dir: Path, keep: int) -> list[Path]:
    """Remove all complete checkpoints but the `keep` newest (at least 1), oldest first; those removed.

    The newest is the one saved last, whatever its step. Damaged ones neither count nor go: the user decides.
    """
    if keep < 1:
        raise UsageError(f"keep {keep}: at least 1 checkpoint has to stay")
    old = [found.path for found in scan(run_dir) if found.complete][keep:]
    for path in reversed(old):
        discard(run_dir / CHECKPOINTS, path)
    return old
