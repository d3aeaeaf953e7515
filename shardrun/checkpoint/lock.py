"""One run folder has one owner."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from shardrun.errors import CheckpointError, LaunchError

LOCK = ".lock"
_BYTES = 512


@dataclass(frozen=True)
class Owner:
    """What the lock file says of its last owner. `token` grows by one with every owner."""

    pid: int
    token: int
    host: str
    since: int


class RunLock:
    """Own `run_dir` (made if it is not there) for the length of a `with` block; one process of a run takes it.

    LaunchError when another process owns it, with its pid, or when the folder cannot be locked. The lock
    ends with the process, however it ends. `token` is the fencing token: `save(..., fence=token)` publishes
    nothing once a later owner has taken the folder, so that a run that was thought dead cannot write into that of its
    successor.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.token = 0
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        path = self.run_dir / LOCK
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise LaunchError(
                f"{self.run_dir}: cannot be used as run folder: {error.strerror}; choose another with run.dir=..."
            ) from error
        try:
            self._lock(descriptor)
            self._sign(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return self

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise LaunchError(
                    f"{self.run_dir}: this file system gives no lock ({error.strerror}); "
                    "two runs in one folder could not be told apart; choose a folder on another one with run.dir=..."
                ) from error
            owner = _parse(os.pread(descriptor, _BYTES, 0))
            who = "another process" if owner is None else f"pid {owner.pid} on {owner.host}"
            raise LaunchError(
                f"{self.run_dir}: this folder is in use by {who}; wait for that run, stop it, or choose another folder"
            ) from None

    def _sign(self, descriptor: int) -> None:
        before = _parse(os.pread(descriptor, _BYTES, 0))
        self.token = 1 if before is None else before.token + 1
        owner = {"pid": os.getpid(), "token": self.token, "host": socket.gethostname()[:200], "since": int(time.time())}
        # One write of one length: a machine that dies here leaves the old owner or the new one.
        os.pwrite(descriptor, json.dumps(owner).encode().ljust(_BYTES - 1) + b"\n", 0)
        os.fsync(descriptor)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def read_owner(run_dir: Path) -> Owner | None:
    """The last owner of `run_dir`, living or not; None where nobody ever owned it. Takes no lock.

    CheckpointError where that cannot be read.
    """
    path = run_dir / LOCK
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return _parse(os.pread(descriptor, _BYTES, 0))
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return None
    except OSError as error:
        told = f"{path}: cannot be read: {error.strerror}; who owns this folder is not known, and nothing was published"
        raise CheckpointError(told) from error


def _parse(text: bytes) -> Owner | None:
    """None for a file that was never signed, or that a dying machine left half written."""
    try:
        found = json.loads(text)
        return Owner(int(found["pid"]), int(found["token"]), str(found["host"]), int(found["since"]))
    except (ValueError, KeyError, TypeError):
        return None
