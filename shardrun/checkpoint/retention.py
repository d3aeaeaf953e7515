"""What goes: left-overs of earlier saves, and old checkpoints once a newer one is published."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardrun.checkpoint.store import CHECKPOINTS, LATEST, STAGING, TRASH, Found, scan
from shardrun.errors import UsageError
from shardrun.records.durable import make_folder, remove_file, remove_tree, rename_new, sync_folder


@dataclass(frozen=True)
class Retention:
    """Which complete checkpoints stay: the `keep` newest (at least 1; None: all), and besides them each whose step is
    a multiple of `keep_every`. The newest is the one saved last, whatever its step."""

    keep: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise UsageError(f"keep {self.keep}: at least 1 checkpoint has to stay")
        if self.keep_every is not None and self.keep_every < 1:
            raise UsageError(f"keep_every {self.keep_every}: steps are counted in whole numbers from 1")

    def outlived(self, found: Sequence[Found]) -> list[Found]:
        """Those of `found` (newest first) that go. Damaged ones neither count nor go: the user decides."""
        if self.keep is None:
            return []
        old = [one for one in found if one.complete][self.keep :]
        return [one for one in old if self.keep_every is None or one.step % self.keep_every]


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


def retire(run_dir: Path, retention: Retention) -> list[Path]:
    """Remove the complete checkpoints that `retention` does not keep, oldest first; those removed."""
    old = [found.path for found in retention.outlived(scan(run_dir))][::-1]
    for path in old:
        discard(run_dir / CHECKPOINTS, path)
    return old
