"""The calls that change a folder, one function each, so that a save can be stopped before any of them.

Whoever writes records or checkpoints does it through this file only. `on_io` is told of each call before it is made:
tests kill the process there, or raise what a full or broken disk would raise.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
from collections.abc import Callable
from pathlib import Path


def _silent(call: str, path: Path) -> None:
    """Nothing; what `on_io` is outside of tests."""


on_io: Callable[[str, Path], None] = _silent
"""Called as on_io(call, path) before each call; mkdir create write start fsync rename exchange replace unlink rmdir."""

_CHUNK = 8 << 20
_NOREPLACE, _EXCHANGE = 1, 2
_START_WRITING = 2
_AT_FDCWD = -100
# What a kernel or file system answers that does not know a call, or one of its flags, or not for files of this kind.
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ESPIPE}


class RenameUnsupported(OSError):
    """This kernel or file system cannot rename in the asked-for way; nothing was done."""


def make_folder(path: Path, *, exist_ok: bool = False) -> None:
    """mkdir, parents included when `exist_ok`."""
    if exist_ok and path.is_dir():
        return
    if exist_ok and not path.parent.is_dir():
        make_folder(path.parent, exist_ok=True)
    on_io("mkdir", path)
    path.mkdir(exist_ok=exist_ok)


def create_file(path: Path) -> int:
    """The descriptor of a new, empty file open for writing; FileExistsError if the name is taken (a link included)."""
    on_io("create", path)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def write_all(descriptor: int, data: bytes | memoryview, path: Path) -> None:
    """Write all bytes of `data`, in pieces of 8 MiB."""
    rest = memoryview(data)
    while rest.nbytes:
        on_io("write", path)
        rest = rest[os.write(descriptor, rest[:_CHUNK]) :]


def start_writing(descriptor: int, start: int, count: int, path: Path) -> None:
    """Let the disk begin with `count` bytes of an open file; a hint: only fsync makes them durable."""
    on_io("start", path)
    call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if call is None:
        return
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    if call(descriptor, start, count, _START_WRITING) != 0 and (number := ctypes.get_errno()) not in _UNSUPPORTED:
        raise OSError(number, os.strerror(number), str(path))


def sync_file(descriptor: int, path: Path) -> None:
    """fsync of an open file."""
    on_io("fsync", path)
    os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """fsync of a folder: the names in it are durable afterwards."""
    on_io("fsync", path)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """A new file with these bytes, fsynced."""
    descriptor = create_file(path)
    try:
        write_all(descriptor, data, path)
        sync_file(descriptor, path)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Put a whole new file in the place of `path`, or leave the old one; durable when it returns."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        write_file(beside, data)
        on_io("replace", path)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    sync_folder(path.parent)


def rename_new(source: Path, target: Path) -> None:
    """Give `source` the name `target`; FileExistsError if something has that name already."""
    on_io("rename", target)
    try:
        _renameat2(source, target, _NOREPLACE)
    except RenameUnsupported:
        # Not atomic against a second writer; the run's lock keeps that one out.
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        source.rename(target)


def exchange(first: Path, second: Path) -> None:
    """Swap what two names stand for, in one step. RenameUnsupported where that cannot be had."""
    on_io("exchange", second)
    _renameat2(first, second, _EXCHANGE)


def _renameat2(source: Path, target: Path, flags: int) -> None:
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise RenameUnsupported(errno.ENOSYS, os.strerror(errno.ENOSYS), str(source))
    call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return
    number = ctypes.get_errno()
    kind = RenameUnsupported if number in _UNSUPPORTED else OSError
    raise kind(number, os.strerror(number), str(source), None, str(target))


def remove_file(path: Path) -> None:
    """unlink; a file that is gone already is fine (another owner of a shared folder may have cleaned up)."""
    on_io("unlink", path)
    path.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Remove a folder and all below it, or a file; links are removed, never followed. What is gone already is fine."""
    if path.is_symlink() or not path.is_dir():
        remove_file(path)
        return
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(path)):
            remove_tree(path / name)
    on_io("rmdir", path)
    with contextlib.suppress(FileNotFoundError):
        path.rmdir()
