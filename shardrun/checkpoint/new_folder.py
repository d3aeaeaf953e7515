"""A folder that is either whole or not there, for what is written outside of a run: a reshard, an export."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from shardrun.checkpoint.store import require_outside
from shardrun.errors import CheckpointError, UsageError
from shardrun.records.durable import make_folder, remove_tree, rename_new, sync_folder


@contextlib.contextmanager
def new_folder(target: Path, needed: int) -> Iterator[Path]:
    """A folder to write `needed` bytes into, which becomes `target` by one rename, durably, when the block ends.

    If the block raises, or the process is killed, there is no `target`. What a killed process leaves stands beside it
    under a hidden name, and goes with the next call for the same target. The block fsyncs its own files.
    UsageError if `target` is there already, or in a checkpoint; CheckpointError for what the disk does not take, with
    both sizes.
    """
    target = Path(os.path.abspath(target))
    require_outside(target)
    if os.path.lexists(target):
        raise _taken(target)
    try:
        make_folder(target.parent, exist_ok=True)
        _clear_leftovers(target)
        if needed > (free := shutil.disk_usage(target.parent).free):
            raise CheckpointError(f"{target}: needs {needed:,} bytes, {free:,} are free there")
        staging = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        make_folder(staging)
        try:
            with _held(staging):
                yield staging
                for folder, _, _ in os.walk(staging, topdown=False):
                    sync_folder(Path(folder))
                _rename(staging, target)
        except BaseException:
            with contextlib.suppress(OSError):
                remove_tree(staging)
            raise
    except OSError as error:
        told = f"{error.strerror} ({error.filename or 'while writing'})"
        raise CheckpointError(f"{target}: cannot be written: {told}; {needed:,} bytes are needed there") from error
    try:
        sync_folder(target.parent)
    except OSError as error:
        told = f"is whole, but whether it would survive a power cut is not known: {error.strerror}"
        raise CheckpointError(f"{target}: {told}") from error


def _rename(staging: Path, target: Path) -> None:
    try:
        rename_new(staging, target)
    except FileExistsError:
        raise _taken(target) from None


def _taken(target: Path) -> UsageError:
    return UsageError(f"{target}: is there already and is left as it is; give a name that is not taken")


def _clear_leftovers(target: Path) -> None:
    for name in sorted(os.listdir(target.parent)):
        if name.startswith(f".{target.name}.") and name.endswith(".part"):
            left = target.parent / name
            # Another process may be at work in it, or have just removed it; and a file is none of ours.
            with contextlib.suppress(BlockingIOError, FileNotFoundError, NotADirectoryError), _held(left):
                remove_tree(left)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which ends with this process; BlockingIOError if another one holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
