"""Opening and listing what somebody else may have put there: no link is followed, nothing but plain files is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from shardrun.errors import CheckpointError
from shardrun.records.header import regular_file

_DEEPEST = 16


def open_inside(root: Path, relative: str) -> BinaryIO:
    """The regular file `relative` below `root`, open for reading, unbuffered; no part of `relative` may be a link.

    The folder `root` itself may be reached through links: where it stands is the user's affair.
    """
    *folders, name = relative.split("/")
    opened = []
    try:
        here = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.append(here)
        for folder in folders:
            here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            opened.append(here)
        # O_NONBLOCK: a pipe in the place of a file must not hold the reader.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here)
    except OSError as error:
        raise CheckpointError(f"{root / relative}: cannot be opened: {error.strerror}") from error
    finally:
        for one in opened:
            os.close(one)
    return regular_file(descriptor, str(root / relative))


def list_tree(root: Path, below: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """(relative path, status) of everything below `root` that is not a folder, in order; links are not followed.

    Nothing of ours lies deeper than _DEEPEST folders: one that does is given as it stands and not looked into.
    """
    with os.scandir(root / below if below else root) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        relative = f"{below}/{entry.name}" if below else entry.name
        if entry.is_dir(follow_symlinks=False) and relative.count("/") < _DEEPEST:
            yield from list_tree(root, relative)
        else:
            yield relative, entry.stat(follow_symlinks=False)
