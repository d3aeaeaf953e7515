"""Watch a forked process call the kernel, and kill it right before one of the calls that change a folder; Linux only.

The process is traced by ptrace, so that every call counts, whoever makes it: not only what goes through
shardrun/records/durable.py. PTRACE_GET_SYSCALL_INFO needs Linux 5.3.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

_TRACEME, _SYSCALL, _SETOPTIONS, _GET_SYSCALL_INFO = 0, 24, 0x4200, 0x420E
_SYSGOOD, _EXITKILL = 1, 0x100000
_AT_ENTRY = 1
_WRITABLE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

# Calls that can change a file or a folder, or make a change durable; those that open do so with some flags only.
_NUMBERS: dict[str, dict[int, str]] = {
    "x86_64": {
        1: "write", 18: "pwrite64", 20: "writev", 296: "pwritev", 328: "pwritev2", 40: "sendfile",
        326: "copy_file_range", 2: "open", 85: "creat", 257: "openat", 437: "openat2", 76: "truncate", 77: "ftruncate",
        285: "fallocate", 74: "fsync", 75: "fdatasync", 162: "sync", 306: "syncfs", 277: "sync_file_range",
        82: "rename", 264: "renameat", 316: "renameat2", 83: "mkdir", 258: "mkdirat", 84: "rmdir", 87: "unlink",
        263: "unlinkat", 86: "link", 265: "linkat", 88: "symlink", 266: "symlinkat", 90: "chmod", 91: "fchmod",
        268: "fchmodat", 280: "utimensat",
    },
    "aarch64": {
        64: "write", 68: "pwrite64", 66: "writev", 70: "pwritev", 287: "pwritev2", 71: "sendfile",
        285: "copy_file_range", 56: "openat", 437: "openat2", 45: "truncate", 46: "ftruncate", 47: "fallocate",
        82: "fsync", 83: "fdatasync", 81: "sync", 267: "syncfs", 84: "sync_file_range", 38: "renameat",
        276: "renameat2", 34: "mkdirat", 35: "unlinkat", 37: "linkat", 36: "symlinkat", 52: "fchmod", 53: "fchmodat",
        88: "utimensat",
    },
}  # fmt: skip
_FLAGS_AT = {"open": 1, "openat": 2}


class _Info(ctypes.Structure):
    """struct ptrace_syscall_info, as far as it is read."""

    _fields_ = [
        ("op", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("instruction_pointer", ctypes.c_uint64),
        ("stack_pointer", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
        ("args", ctypes.c_uint64 * 6),
    ]


@dataclass
class Traced:
    """What became of a traced process: the changing calls that it made or was about to make, and how it ended."""

    calls: list[str] = field(default_factory=list)
    killed: bool = False
    code: int = 0


def unavailable() -> str:
    """Why processes cannot be traced here; "" if they can."""
    if sys.platform != "linux" or platform.machine() not in _NUMBERS:
        return f"no table of system calls for {sys.platform} on {platform.machine()}"
    try:
        return "" if run_traced(lambda: None).code == 0 else "a traced process does not end as it should"
    except OSError as error:
        return f"processes cannot be traced here: {error}"


def run_traced(work: Callable[[], object], kill_before: int | None = None) -> Traced:
    """Do `work` in a fork of this process, which gets SIGKILL right before its `kill_before`-th changing call."""
    child = os.fork()
    if child == 0:
        _be_traced(work)
    os.waitpid(child, 0)  # it stops itself
    names, traced, deliver, working = _NUMBERS[platform.machine()], Traced(), 0, True
    _ptrace(_SETOPTIONS, child, 0, _SYSGOOD | _EXITKILL)
    while True:
        if len(traced.calls) == kill_before:
            os.kill(child, signal.SIGKILL)  # a call at whose entry it is stopped is not made any more
        else:
            _ptrace(_SYSCALL, child, 0, deliver)
        _, status = os.waitpid(child, 0)
        if not os.WIFSTOPPED(status):
            traced.killed = os.WIFSIGNALED(status)
            traced.code = -os.WTERMSIG(status) if traced.killed else os.WEXITSTATUS(status)
            return traced
        stop = os.WSTOPSIG(status)
        if stop == signal.SIGSTOP:  # its work is done; how it leaves (coverage writes files then) is not watched
            working, deliver = False, 0
            continue
        deliver = 0 if stop == signal.SIGTRAP | 0x80 else stop
        if working and deliver == 0 and (name := _changing(child, names)):
            traced.calls.append(name)


def _be_traced(work: Callable[[], object]) -> None:
    code = 1
    try:
        _ptrace(_TRACEME, 0, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        work()
        os.kill(os.getpid(), signal.SIGSTOP)
        code = 0
    finally:
        os._exit(code)


def _changing(child: int, names: dict[int, str]) -> str:
    """The name of the call at whose entry the process stands, if it is one that changes something; else ""."""
    info = _Info()
    size = _ptrace(_GET_SYSCALL_INFO, child, ctypes.sizeof(info), ctypes.addressof(info))
    if size <= _Info.number.offset or info.op != _AT_ENTRY:
        return ""
    name = names.get(info.number, "")
    if name in _FLAGS_AT and not info.args[_FLAGS_AT[name]] & _WRITABLE:
        return ""
    return name


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_LIBC.ptrace.restype = ctypes.c_long


def _ptrace(request: int, pid: int, address: int, data: int) -> int:
    result: int = _LIBC.ptrace(request, pid, address, data)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
